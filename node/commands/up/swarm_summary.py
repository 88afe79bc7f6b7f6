"""The peers of `murmur up` at one moment, and the table that shows them.

On a terminal the table is redrawn in place; otherwise one plain line is printed every few seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from node.monitoring.status import COMPUTE_ACTIVITIES, NodeStatus, sum_seconds
from node.units import format_bytes, format_clock, format_count

PeerProcessState = Literal["starting", "running", "lost", "ended"]
PLAIN_LINE_SECONDS = 5.0
COLUMNS = ("peer", "state", "round", "step", "loss", "tok/s", "sent", "included", "digest")
COLOURS = {
    "training": "green",
    "exchanging": "cyan",
    "paused": "yellow",
    "done": "bold green",
    "ended": "bold green",
    "lost": "bold red",
}


@dataclass(frozen=True)
class PeerSummary:
    """One peer; `status` is the last one since its latest start, `bytes_sent` counts all its starts."""

    name: str
    state: PeerProcessState
    status: NodeStatus | None
    bytes_sent: int = 0

    @property
    def state_word(self) -> str:
        if self.state != "running" or self.status is None:
            return self.state
        return "paused" if self.status.paused else self.status.phase

    @property
    def round(self) -> int:
        return self.status.round if self.status else 0


@dataclass(frozen=True)
class SwarmSummary:
    """All peers of the swarm, `elapsed` seconds after its start."""

    run: str
    target_rounds: int | None
    target_tokens: int | None
    elapsed: float
    peers: tuple[PeerSummary, ...]

    @property
    def running_peers(self) -> tuple[PeerSummary, ...]:
        return tuple(peer for peer in self.peers if peer.state == "running")

    @property
    def round(self) -> int:
        return max((peer.round for peer in self.peers), default=0)

    @property
    def tokens(self) -> int:
        return max((peer.status.chain_tokens for peer in self.peers if peer.status), default=0)

    @property
    def seconds_left(self) -> float | None:
        """Return the time to the target as the first running peer knows it; None before two rounds."""
        known = (peer.status.seconds_left for peer in self.running_peers if peer.status)
        return next((left for left in known if left is not None), None)

    @property
    def progress(self) -> float:
        """Return the progress from 0 to 1 towards the nearer of the two targets."""
        rounds = self.round / self.target_rounds if self.target_rounds else 0.0
        tokens = self.tokens / self.target_tokens if self.target_tokens else 0.0
        return min(1.0, max(rounds, tokens))


@dataclass
class PeerTotals:
    """The totals of one peer over all its starts in this swarm: the last status of each start, by start time."""

    status_by_start: dict[float, NodeStatus]

    def record(self, status: NodeStatus) -> None:
        """Keep the status as the last one of its start."""
        self.status_by_start[status.since] = status

    @property
    def peer_id(self) -> str:
        """Return the id of the peer; empty before its first status."""
        return next((status.peer_id for status in self.status_by_start.values()), "")

    @property
    def name(self) -> str:
        return next((status.name for status in self.status_by_start.values()), "")

    @property
    def bytes_sent(self) -> int:
        return sum(status.bytes_sent for status in self.status_by_start.values())

    def newest_seconds(self) -> dict[str, float]:
        """Return the seconds by activity of the newest start that reports any.

        A restarted trainer continues the counts of its checkpoint, so the starts must not be added up.
        """
        reported = {since: status.seconds for since, status in self.status_by_start.items() if status.seconds}
        return dict(reported[max(reported)]) if reported else {}


def compute_share(peer_totals: Sequence[PeerTotals]) -> float | None:
    """Return the fraction of the trainers' seconds that they spent training or evaluating the model."""
    seconds_by_peer = [totals.newest_seconds() for totals in peer_totals]
    total = sum(sum(seconds.values()) for seconds in seconds_by_peer)
    return sum(sum_seconds(seconds, *COMPUTE_ACTIVITIES) for seconds in seconds_by_peer) / total if total else None


class SwarmDisplay:
    """Shows summaries and prints lines; `plain` forces plain lines, as when the output is not a terminal."""

    def __init__(self, console: Console, plain: bool = False) -> None:
        self._console = console
        self._shown_at = -PLAIN_LINE_SECONDS
        is_live = console.is_terminal and not console.is_dumb_terminal and not plain
        self._live = Live(console=console, auto_refresh=False) if is_live else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def print_line(self, text: str) -> None:
        """Print a line that stays above the table."""
        self._console.print(Text(text), soft_wrap=True)

    def show(self, swarm: SwarmSummary) -> None:
        """Redraw the table, or print a plain line if one is due."""
        remaining = swarm.seconds_left
        if self._live:
            self._live.update(Group(Text(format_header(swarm, remaining)), build_table(swarm)), refresh=True)
        elif swarm.elapsed - self._shown_at >= PLAIN_LINE_SECONDS:
            self._shown_at = swarm.elapsed
            self.print_line(format_plain_line(swarm, remaining))


def format_header(swarm: SwarmSummary, remaining: float | None) -> str:
    """Return the line above the table."""
    running = f"{len(swarm.running_peers)} of {len(swarm.peers)} peers"
    return " · ".join(
        (swarm.run, running, _format_round(swarm), format_clock(swarm.elapsed), f"time left {format_clock(remaining)}")
    )


def build_table(swarm: SwarmSummary) -> Table:
    """Return the table with one row per peer."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("peer", "state", "digest") else "right", no_wrap=True)
    for peer in swarm.peers:
        table.add_row(*format_cells(peer), style="dim" if peer.state in ("starting", "lost") else None)
    return table


def format_cells(peer: PeerSummary) -> tuple[Text, ...]:
    """Return the cells of a peer, one for each of COLUMNS."""
    state = Text(peer.state_word, style=COLOURS.get(peer.state_word, ""))
    status = peer.status
    if status is None:
        return (Text(peer.name), state, *(Text("-") for _ in COLUMNS[2:]))
    contributions = status.contributions_included + status.contributions_excluded
    cells = (
        str(status.round),
        str(status.step),
        "-" if status.loss is None else f"{status.loss:.3f}",
        format_count(status.tokens_per_second),
        format_bytes(peer.bytes_sent),
        f"{status.contributions_included}/{contributions}",
        status.digest[:8] or "-",
    )
    return (Text(peer.name), state, *map(Text, cells))


def format_plain_line(swarm: SwarmSummary, remaining: float | None) -> str:
    """Return one line that summarises the swarm."""
    statuses = [peer.status for peer in swarm.peers if peer.status and peer.state == "running"]
    losses = [status.loss for status in statuses if status.loss is not None]
    loss = f"loss {sum(losses) / len(losses):.3f}" if losses else "loss -"
    speed = f"{format_count(sum(status.tokens_per_second for status in statuses))} tok/s"
    sent = f"sent {format_bytes(sum(peer.bytes_sent for peer in swarm.peers))}"
    states = ", ".join(f"{peer.name} {peer.state_word}" for peer in swarm.peers)
    return " · ".join(
        (
            _format_round(swarm),
            format_clock(swarm.elapsed),
            f"time left {format_clock(remaining)}",
            loss,
            speed,
            sent,
            states,
        )
    )


def _format_round(swarm: SwarmSummary) -> str:
    if swarm.target_rounds:
        return f"round {swarm.round} of {swarm.target_rounds}"
    if swarm.target_tokens:
        return f"round {swarm.round} · {format_count(swarm.tokens)} of {format_count(swarm.target_tokens)} tokens"
    return f"round {swarm.round}"

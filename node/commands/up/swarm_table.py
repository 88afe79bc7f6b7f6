"""The live table of a local swarm: redrawn in place on a terminal, otherwise one plain line every few seconds."""

from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from node.commands.up.swarm_summary import PeerSummary, SwarmSummary
from node.monitoring.display import RemainingTime
from node.units import format_bytes, format_clock, format_count

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


class SwarmDisplay:
    """Shows summaries and prints lines; `plain` forces plain lines, as when the output is not a terminal."""

    def __init__(self, console: Console, plain: bool = False) -> None:
        self._console = console
        self._remaining = RemainingTime()
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
        remaining = self._remaining.estimate(swarm.elapsed, swarm.progress)
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

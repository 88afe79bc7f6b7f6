"""The live table of a local swarm: redrawn in place on a terminal, one plain line every few seconds elsewhere."""

from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from node.local.views import PeerView, Remaining, SwarmView
from node.status import short_bytes, short_count

PLAIN_INTERVAL = 5.0
COLUMNS = ("peer", "state", "round", "step", "loss", "tok/s", "sent", "included", "digest")
COLOURS = {
    "training": "green",
    "exchanging": "cyan",
    "paused": "yellow",
    "done": "bold green",
    "ended": "bold green",
    "lost": "bold red",
}


class Display:
    """Shows views and says what happens. `plain` forces lines, as when the output is not a terminal."""

    def __init__(self, console: Console, plain: bool = False) -> None:
        self._console = console
        self._remaining = Remaining()
        self._shown_at = -PLAIN_INTERVAL
        self._live = None if plain or not console.is_terminal else Live(console=console, auto_refresh=False)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """One line that stays."""
        self._console.print(Text(text), soft_wrap=True)

    def show(self, view: SwarmView) -> None:
        remaining = self._remaining.estimate(view)
        if self._live:
            self._live.update(Group(Text(header(view, remaining)), table(view)), refresh=True)
        elif view.elapsed - self._shown_at >= PLAIN_INTERVAL:
            self._shown_at = view.elapsed
            self.say(plain_line(view, remaining))


def header(view: SwarmView, remaining: float | None) -> str:
    ready = f"{len(view.present)} of {len(view.peers)} peers"
    return " · ".join((view.run, ready, _round(view), clock(view.elapsed), f"left {clock(remaining)}"))


def table(view: SwarmView) -> Table:
    drawn = Table(box=None, pad_edge=False, header_style="dim")
    for column in COLUMNS:
        drawn.add_column(column, justify="left" if column in ("peer", "state", "digest") else "right", no_wrap=True)
    for peer in view.peers:
        drawn.add_row(*cells(peer), style="dim" if peer.state in ("starting", "lost") else None)
    return drawn


def cells(peer: PeerView) -> tuple[Text, ...]:
    """One for each of COLUMNS."""
    state = Text(peer.word, style=COLOURS.get(peer.word, ""))
    status = peer.status
    if status is None:
        return (Text(peer.name), state, *(Text("-") for _ in COLUMNS[2:]))
    offered = status.contributions_included + status.contributions_excluded
    words = (
        str(status.round),
        str(status.step),
        "-" if status.loss is None else f"{status.loss:.3f}",
        short_count(status.tokens_per_second),
        short_bytes(peer.sent),
        f"{status.contributions_included}/{offered}",
        status.digest[:8] or "-",
    )
    return (Text(peer.name), state, *map(Text, words))


def plain_line(view: SwarmView, remaining: float | None) -> str:
    statuses = [peer.status for peer in view.peers if peer.status and peer.state == "running"]
    losses = [status.loss for status in statuses if status.loss is not None]
    loss = f"loss {sum(losses) / len(losses):.3f}" if losses else "loss -"
    speed = f"{short_count(sum(status.tokens_per_second for status in statuses))} tok/s"
    sent = f"sent {short_bytes(sum(peer.sent for peer in view.peers))}"
    states = ", ".join(f"{peer.name} {peer.word}" for peer in view.peers)
    return " · ".join((_round(view), clock(view.elapsed), f"left {clock(remaining)}", loss, speed, sent, states))


def clock(seconds: float | None) -> str:
    """75 -> 1:15; unknown: -"""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _round(view: SwarmView) -> str:
    if view.target_rounds:
        return f"round {view.round} of {view.target_rounds}"
    if view.target_tokens:
        return f"round {view.round} · {short_count(view.tokens)} of {short_count(view.target_tokens)} tokens"
    return f"round {view.round}"

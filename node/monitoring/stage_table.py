"""The stages of a pipeline as `murmur status` and the page show them. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from node.units import format_plural

BAR_CELLS = 10
# Counts that other peers see, with their fields in the peer record; the wire keeps an older word for one of them.
MICROBATCH_FIELDS: Final = {
    "done": "microbatches_done",
    "partly counted": "microbatches_torn",
    "lost": "microbatches_lost",
    "replayed": "microbatches_replayed",
    "dropped": "microbatches_dropped",
}


def sum_microbatches(counts: Mapping[str, int]) -> dict[str, int]:
    """Return an owner's counts by the words that others see; `dropped` is the sum over its reasons."""
    dropped = sum(count for word, count in counts.items() if word.startswith("dropped"))
    return {word: dropped if word == "dropped" else counts.get(word, 0) for word in MICROBATCH_FIELDS}


class StageReport(NamedTuple):
    """The report of one ready peer: its stage, its microbatches a second (0 while it takes no work), its round."""

    stage: int
    rate: float
    round: int


class StageEntry(BaseModel):
    """One stage: its ready peers, their rate together, and the microbatches of this node that wait for one of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: int = Field(description="from 0 on")
    peers: int = 0
    rate: float = Field(default=0.0, description="microbatches a second that its peers report, together")
    round: int = Field(default=0, description="the highest that a peer, or two of three or more, report")
    waiting: int = Field(default=0, description="microbatches of this node that wait for a peer of the stage")


def build_stage_table(peers: Iterable[StageReport], waiting: Sequence[int]) -> tuple[StageEntry, ...]:
    """Return an entry for each stage; `waiting` has the waiting microbatches of each."""
    served: list[list[StageReport]] = [[] for _ in waiting]
    for peer in peers:
        served[peer.stage].append(peer)
    return tuple(
        StageEntry(
            stage=stage,
            peers=len(group),
            rate=sum(peer.rate for peer in group),
            round=_reported_round(group),
            waiting=waiting[stage],
        )
        for stage, group in enumerate(served)
    )


def _reported_round(group: Sequence[StageReport]) -> int:
    """Return the highest round that a peer reports; where three or more serve, the highest that two of them report."""
    rounds = sorted((peer.round for peer in group), reverse=True)
    return rounds[0 if len(rounds) < 3 else 1] if rounds else 0


def describe_empty_stages(table: Sequence[StageEntry]) -> tuple[str, ...]:
    """Return a sentence for each stage that nobody serves."""
    return tuple(
        f"nobody serves stage {entry.stage}" + (f", and {describe_waiting(entry.waiting)}" if entry.waiting else "")
        for entry in table
        if not entry.peers
    )


def stage_lines(table: Sequence[StageEntry], own: int | None) -> tuple[str, ...]:
    """Return a line for each stage; `own` is the one of this node."""
    most = max((entry.rate for entry in table), default=0.0)
    return tuple(_stage_line(entry, most, entry.stage == own) for entry in table)


def bar_share(entry: StageEntry, table: Sequence[StageEntry]) -> float:
    """Return the rate of a stage as a share of the fastest stage's."""
    most = max(other.rate for other in table)
    return entry.rate / most if most else 0.0


def _stage_line(entry: StageEntry, most: float, is_own: bool) -> str:
    own = " (this node's)" if is_own else ""
    waiting = [describe_waiting(entry.waiting)] if entry.waiting else []
    if not entry.peers:
        return " · ".join((f"stage {entry.stage}{own}: nobody serves it", *waiting))
    bar = "█" * max(1, round(BAR_CELLS * entry.rate / most)) if entry.rate else "-"
    figures = (format_plural(entry.peers, "peer"), f"{entry.rate:.3g} microbatches/s", f"round {entry.round}")
    return " · ".join((f"stage {entry.stage}{own}: {bar:<{BAR_CELLS}} {figures[0]}", *figures[1:], *waiting))


def describe_waiting(count: int) -> str:
    return "1 microbatch waits" if count == 1 else f"{count} microbatches wait"

"""Why a round went without this node's work: a word for the counter and a line for the person. PURE."""

from typing import NamedTuple

from node.status import NodeStatus
from protocol.rounds.events import Reason


class Absence(NamedTuple):
    """`word` is one of a few; `text` says more."""

    word: str
    text: str


BEHIND = Absence("catching up", "it was decided before this node had caught up")
MISHAPS: dict[Reason, str] = {
    "late": "our message came after the round's roster was closed; it goes with the next one",
    "left out": "too few peers got our message in time: the upload is slow; it goes on, and joins the next round",
    "lost": "nobody could fetch our message in time; see whether the upload is too slow",
}


def absence(status: NodeStatus, mishap: Reason | None, offered: bool, rounds: int) -> Absence:
    """`mishap`: what the round did to our message; `offered`: whether we had one; `rounds`: how many came at once."""
    if rounds > 1 or status.phase in ("joining", "waiting for peers", "catching up"):
        return BEHIND
    if mishap is not None:
        return Absence(mishap, MISHAPS.get(mishap, mishap))
    if offered:
        return Absence("late", MISHAPS["late"])
    if status.paused:
        return Absence("paused", f"paused, {status.paused}")
    if status.trainer_trouble:
        return Absence("no trainer", status.trainer_trouble)
    return Absence("slow", "the others were done before our message was ready; this machine is slower than they are")

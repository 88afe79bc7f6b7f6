"""Why a round went without this node's work: a word for the counter and a line for the person. PURE."""

from typing import NamedTuple

from node.status import NodeStatus
from protocol.rounds.events import RejectReason


class MissReason(NamedTuple):
    """`word` is one of a few; `text` says more."""

    word: str
    text: str


CATCHING_UP = MissReason("catching up", "it was decided before this node had caught up")
REJECT_TEXTS: dict[RejectReason, str] = {
    "late": "our message came after the round's roster was closed; it goes with the next one",
    "left out": "too few peers got our message in time: the upload is slow; it goes on, and joins the next round",
    "lost": "nobody could fetch our message in time; see whether the upload is too slow",
}


def find_miss_reason(status: NodeStatus, reject_reason: RejectReason | None, is_submitted: bool, rounds: int) -> MissReason:
    """`mishap`: what the round did to our message; `offered`: whether we had one; `rounds`: how many came at once."""
    if rounds > 1 or status.phase in ("joining", "waiting for peers", "catching up"):
        return CATCHING_UP
    if reject_reason is not None:
        return MissReason(reject_reason, REJECT_TEXTS.get(reject_reason, reject_reason))
    if is_submitted:
        return MissReason("late", REJECT_TEXTS["late"])
    if status.paused:
        return MissReason("paused", f"paused, {status.paused}")
    if status.trainer_trouble:
        return MissReason("no trainer", status.trainer_trouble)
    return MissReason("slow", "the others were done before our message was ready; this machine is slower than they are")

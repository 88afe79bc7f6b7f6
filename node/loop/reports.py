"""The words in which the round loop reports to people. PURE."""

from node.loop.catch_up import SyncTarget
from node.loop.events import LoopAction, ReportMissed, ReportRecovered
from node.units import format_bytes, format_plural
from protocol.blobs.blob import Blob

UNKNOWN_REVISIONS = "it names revisions of the organiser that are not known here"


def wrong_state(round_number: int) -> list[LoopAction]:
    """Report that most peers on our head have another state."""
    line = f"our state after round {round_number} differs from the others'"
    return [ReportRecovered("state differs", line), ReportMissed("our state differed from the others'")]


def not_applied(round_number: int, reason: str) -> list[LoopAction]:
    """Report a decided round that cannot be applied."""
    line = f"round {round_number} is decided but cannot be applied here: {reason}"
    return [ReportRecovered("not applied", line), ReportMissed(reason)]


def sync_failed(target: SyncTarget, reason: str) -> LoopAction:
    """Report a failed sync."""
    line = f"cannot follow {target.peers[0]} to round {target.head.round}: {reason}"
    return ReportRecovered("sync failed", line)


def waiting(present: int, needed: int) -> str:
    """Return the reason for which a run does not begin."""
    return f"{present} of {needed} peers are here; the run begins with {needed}"


def replaying(rounds: int, first: int) -> str:
    """Return what a peer does that applies the commits of others."""
    return f"replaying {format_plural(rounds, 'round')} from round {first} on"


def fetching(state: Blob, round_number: int) -> str:
    """Return what a peer does that downloads a state."""
    return f"fetching the state of round {round_number} ({format_bytes(state.size)})"

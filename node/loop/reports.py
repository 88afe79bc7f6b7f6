"""The words in which the round loop reports to people. PURE."""

from node.loop.actions import LoopAction, ReportMissed, ReportRecovered
from node.loop.peers.catch_up import SyncTarget
from node.units import format_bytes, format_plural
from protocol.blobs.blob import Blob

SHUT_OUT = (
    "nobody vouches for the run's chain; ask its organiser for a trust point (`murmur status` shows one) and join with "
    "--trust"
)
NO_WEIGHTS = (
    "no peer has the weights with which this run starts; one must be started with the folder that holds them "
    "(model.from)"
)
UNKNOWN_REVISIONS = "it names revisions of the organiser that are not known here"


RESTORED = (
    "this folder was copied or restored, and its key may have signed this round already; going on with the next one"
)
RESTORED_ALONE = (
    "this folder was copied or restored, and no peer is here that knows the rounds since; to go on alone, return to an "
    "earlier checkpoint with a new key (`murmur rollback`)"
)


def wrong_state(round_number: int) -> list[LoopAction]:
    """Report that most peers on our head have another state."""
    line = f"our state after round {round_number} differs from the others'"
    return [ReportRecovered("state differs", line), ReportMissed("our state differed from the others'")]


def not_applied(round_number: int, reason: str) -> list[LoopAction]:
    """Report a decided round that cannot be applied."""
    line = f"round {round_number} is decided but cannot be applied here: {reason}"
    return [ReportRecovered("not applied", line), ReportMissed(reason)]


def no_verdict(round_number: int) -> str:
    """Say why a decided round of an exact step cannot be applied."""
    return f"no peer reports whether all stages made the step of round {round_number}"


def stage_behind(round_number: int) -> str:
    """Say why a stage does not open its next round."""
    return f"another stage of the pipeline is at round {round_number} yet"


def sync_failed(target: SyncTarget, reason: str) -> LoopAction:
    """Report a failed sync."""
    line = f"cannot follow {target.peers[0]} to round {target.head.round}: {reason}"
    return ReportRecovered("sync failed", line)


def not_certified(target: SyncTarget, reason: str) -> LoopAction:
    """Report a chain that its peer could not prove."""
    return ReportRecovered("not certified", f"{target.peers[0]} shows a chain that is not followed: {reason}")


def jump_held(target: SyncTarget, lost: int) -> LoopAction:
    """Report a preferred chain that only a person may follow, because much of ours would be lost."""
    line = (
        f"{target.peers[0]} shows a chain with more votes that lacks at least {lost} rounds of ours; compare the run "
        "with its organiser, then restart with --accept-jump to follow it"
    )
    return ReportRecovered("jump held", line)


def split(target: SyncTarget) -> LoopAction:
    """Report another chain of the run that peers carry, and that shares no kept round with ours."""
    line = (
        f"{target.peers[0]} is on another chain of this run, at round {target.head.round}, that has no kept round in "
        "common with ours; if they do not become one soon, ask the organiser which one is the run; stop the nodes of "
        "the other one, move their folders away and join again"
    )
    return ReportRecovered("split", line)


def waiting(present: int, ready: int, needed: int, *, has_begun: bool) -> str:
    """Return the reason for which a run does not begin, or for which a peer that is alone does not go on."""
    if has_begun:
        return "none of the others is here yet"
    starting = "" if ready == present else f", {ready} of them ready to train"
    return f"{present} of {needed} peers are here{starting}; the run begins with {needed}"


def replaying(rounds: int, first: int) -> str:
    """Return what a peer does that applies the commits of others."""
    return f"replaying {format_plural(rounds, 'round')} from round {first} on"


def fetching(state: Blob, round_number: int) -> str:
    """Return what a peer does that downloads a state."""
    return f"fetching the state of round {round_number} ({format_bytes(state.size)})"

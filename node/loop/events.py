"""Define what goes into the round loop and what comes out of it. PURE.

Events say what happened; actions say what to do. Both are values: a log of the events with their times replays a
node's part in a run exactly. The actions `Send`, `VoteRecord`, `RequestEarlySubmit` and `Rejected` are those of the
round machine; the loop passes them on.
"""

from dataclasses import dataclass
from typing import Any

from node.daemon.outer_state import SignedContributions
from node.ipc.channel import ContributionOutcome
from node.loop.catch_up import SyncPlan
from node.loop.contributions import ForkOutcome
from node.loop.swarm_snapshot import SwarmSnapshot
from node.monitoring.status import CatchUpKind, Phase, RecoveredErrorKind
from protocol.blobs.blob import Blob
from protocol.consensus.events import PartReduced, Reduce, Rejected, RequestEarlySubmit, Send, VoteRecord
from protocol.consensus.messages import Commit, Digest, PartBlob, SignedMessage
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed

# Events


@dataclass(frozen=True)
class SwarmChanged:
    """The swarm view has news, or may have."""

    snapshot: SwarmSnapshot


@dataclass(frozen=True)
class MessagesReceived:
    """`sender` delivered these checked messages; it need not have signed all of them."""

    sender: PeerId
    messages: tuple[SignedMessage[Any], ...]


@dataclass(frozen=True)
class ContributionReady:
    """The contribution tracker has a new contribution, its blobs in the store."""


@dataclass(frozen=True)
class BlobFetched:
    """Answers FetchBlob: the blob is complete in our store, and well-formed as that part."""

    opening: int
    part_blob: PartBlob


@dataclass(frozen=True)
class SumReady:
    """Answers ReducePart."""

    opening: int
    result: PartReduced


@dataclass(frozen=True)
class VotePersisted:
    """Answers VoteRecord: the vote is on disk, and so are the blobs that it requires."""


@dataclass(frozen=True)
class TrainerStarted:
    """Answers StartTrainer."""


@dataclass(frozen=True)
class CommitComputed:
    """Answers ApplyCommit: the next state is computed from these contributions; nothing has changed yet."""

    contributions: SignedContributions


@dataclass(frozen=True)
class CommitApplied:
    """Answers AdvanceState: the chain ends with the commit, and `state` is the digest of the state after it."""

    state: Digest


@dataclass(frozen=True)
class ApplyFailed:
    """Answers ApplyCommit when a blob could not be had or does not decode. Nothing has changed."""

    reason: str


@dataclass(frozen=True)
class PathFound:
    """Answers FindPath."""

    plan: SyncPlan


@dataclass(frozen=True)
class StateInstalled:
    """Answers TakeState: chain and outer state are those of the plan."""

    state: Digest


@dataclass(frozen=True)
class SyncFailed:
    """Answers FindPath or TakeState. `has_vanished`: nobody holds the blob any more. Nothing has changed."""

    reason: str
    has_vanished: bool = False


@dataclass(frozen=True)
class HeadPublished:
    """Answers PublishHead and AdoptState: the next round may open."""


@dataclass(frozen=True)
class Started:
    """The node is on the network; the first event."""


@dataclass(frozen=True)
class Stopped:
    """The node leaves; the loop does nothing more but answer peers that ask about decided rounds."""


@dataclass(frozen=True)
class TimePassed:
    """The time of `RoundLoop.next_deadline` has come."""


LoopEvent = (
    SwarmChanged
    | MessagesReceived
    | ContributionReady
    | BlobFetched
    | SumReady
    | VotePersisted
    | TrainerStarted
    | CommitComputed
    | CommitApplied
    | ApplyFailed
    | PathFound
    | StateInstalled
    | SyncFailed
    | HeadPublished
    | Started
    | Stopped
    | TimePassed
)

# Actions


@dataclass(frozen=True)
class Answer:
    """Tell a peer that asks about a decided round what was decided."""

    peer: PeerId
    messages: tuple[Signed, ...]


@dataclass(frozen=True)
class FetchBlob:
    """Download a blob for the open round, check it as that part, and answer with BlobFetched.

    It comes again when the sources change. Retry until the round closes.

    Args:
        opening: hand it back.
        sources: in order of preference; there may be none that we know.
        priority: lower numbers first.
        seconds: that one try may take.
        owner_message: the message by which the owner names the blob, for a relay.
    """

    opening: int
    round: int
    part_blob: PartBlob
    sources: tuple[PeerId, ...]
    priority: int
    seconds: float
    owner_message: Signed | None


@dataclass(frozen=True)
class ReducePart:
    """Carry out a reduction of the round machine; hand `opening` back with the result."""

    opening: int
    round: int
    order: Reduce


@dataclass(frozen=True)
class CloseRound:
    """Cancel all downloads and reductions of the round."""


@dataclass(frozen=True)
class PrecomputeCommit:
    """Begin to compute what will most likely be decided; all that it takes is in the store. It binds nobody."""

    commit: Commit
    contributions: SignedContributions


@dataclass(frozen=True)
class StartTrainer:
    """Start the trainer from our state."""


@dataclass(frozen=True)
class ApplyCommit:
    """Obtain what the commit takes and compute the state after it; answer with CommitComputed or ApplyFailed.

    Args:
        may_lose: whether contributions that cannot be had are left out; otherwise all are needed.
        seconds: that a download may take.
    """

    commit: SignedMessage[Commit]
    contributions: SignedContributions
    may_lose: bool
    seconds: float


@dataclass(frozen=True)
class AdvanceState:
    """Hand the computed state to the trainer, then make it ours; answer with CommitApplied."""

    commit: SignedMessage[Commit]
    outcome: ContributionOutcome


@dataclass(frozen=True)
class PublishHead:
    """Report and announce the new head, and save; answer with HeadPublished.

    The checkpoint before this one must be on disk before anybody hears of this round.
    """

    commit: Commit
    contributions: SignedContributions
    outcome: ContributionOutcome


@dataclass(frozen=True)
class FindPath:
    """Ask a peer how to get to its head; answer with PathFound or SyncFailed."""

    peer: PeerId
    replay: bool
    history_since: int


@dataclass(frozen=True)
class TakeState:
    """Download a state from its holders and install it; answer with StateInstalled or SyncFailed."""

    plan: SyncPlan
    state: Blob
    holders: tuple[PeerId, ...]


@dataclass(frozen=True)
class AdoptState:
    """Hand the installed state to the trainer, save, and only then report and announce; answer with HeadPublished.

    Args:
        commits: those of the other chain that follow our old head.
        skipped: rounds that we did not apply ourselves.
    """

    commits: tuple[Commit, ...]
    verdict: ForkOutcome
    skipped: int


@dataclass(frozen=True)
class ReportPhase:
    phase: Phase
    reason: str = ""


@dataclass(frozen=True)
class ReportRecovered:
    """Log and count an error that mends itself."""

    kind: RecoveredErrorKind
    line: str


@dataclass(frozen=True)
class ReportMissed:
    """Say why the open round goes without our work."""

    reason: str


@dataclass(frozen=True)
class ReportPace:
    """Say how many of the planned steps this peer makes; empty when it makes all."""

    words: str


@dataclass(frozen=True)
class ReportCatchUp:
    """Count rounds that others made without us."""

    kind: CatchUpKind
    rounds: int


@dataclass(frozen=True)
class TargetReached:
    """The run is over."""


LoopAction = (
    Send
    | Answer
    | FetchBlob
    | ReducePart
    | VoteRecord
    | CloseRound
    | PrecomputeCommit
    | RequestEarlySubmit
    | Rejected
    | StartTrainer
    | ApplyCommit
    | AdvanceState
    | PublishHead
    | FindPath
    | TakeState
    | AdoptState
    | ReportPhase
    | ReportRecovered
    | ReportMissed
    | ReportPace
    | ReportCatchUp
    | TargetReached
)

"""Define the actions that the round loop asks for. PURE.

The actions `Send`, `VoteRecord`, `RequestEarlySubmit` and `Rejected` are those of the round machine; the loop passes
them on.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from node.daemon.state.outer_state import SignedContributions
from node.loop.contributions import ForkOutcome
from node.loop.peers.catch_up import SyncOffer
from node.monitoring.status import CatchUpKind, Phase, RecoveredErrorKind
from node.trainer.ipc.channel import ContributionOutcome
from protocol.blobs.blob import Blob
from protocol.conduct import PeerConvicted, Proof
from protocol.consensus.chain import CertifiedCommit, ChainHead
from protocol.consensus.events import (
    Reduce,
    Rejected,
    RequestEarlySubmit,
    Send,
    VoteRecord,
)
from protocol.consensus.messages.contributions import Commit, PartBlob
from protocol.consensus.messages.signed import SignedMessage
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed
from protocol.pipeline.ledger import StepLedger


@dataclass(frozen=True)
class SendReply:
    """Send the decision to a peer that asks about a decided round."""

    peer: PeerId
    messages: tuple[Signed, ...]


@dataclass(frozen=True)
class FetchBlob:
    """Download a blob for the open round, check it as that part, and answer with BlobFetched.

    The action is repeated when the sources change. Retry until the round closes.

    Args:
        opening: returned in the answer.
        round: the open round.
        part_blob: the blob and its part.
        sources: in order of preference; may be empty.
        priority: lower numbers first.
        seconds: the timeout of one try.
        owner_message: the message in which the owner names the blob, for a relay.
        owners: peers that have to have the blob; if one denies it or it does not decode, answer with BlobMissing too.
    """

    opening: int
    round: int
    part_blob: PartBlob
    sources: tuple[PeerId, ...]
    priority: int
    seconds: float
    owner_message: Signed | None
    owners: tuple[PeerId, ...] = ()


@dataclass(frozen=True)
class ReducePart:
    """Carry out a reduction of the round machine; answer with SumReady and the same `opening`."""

    opening: int
    round: int
    order: Reduce


@dataclass(frozen=True)
class CloseRound:
    """Cancel all downloads and reductions of the round."""


@dataclass(frozen=True)
class PrecomputeCommit:
    """Start to compute a commit that will probably be decided; its blobs are in the store. It has no effect yet."""

    commit: Commit
    contributions: SignedContributions


@dataclass(frozen=True)
class StartTrainer:
    """Start the trainer from our state."""


@dataclass(frozen=True)
class ApplyCommit:
    """Fetch the blobs of the commit and compute the state after it; answer with CommitComputed or ApplyFailed.

    Args:
        commit: the decided commit.
        contributions: those that this peer applies.
        may_lose: whether to leave out unavailable contributions; otherwise all are needed.
        seconds: the timeout of a download.
    """

    commit: CertifiedCommit
    contributions: SignedContributions
    may_lose: bool
    seconds: float


@dataclass(frozen=True)
class PublishStep:
    """Let all stages know how ours has decided an exact step; they fetch the certificate from us."""

    round: int
    is_complete: bool
    lacking: StepLedger


@dataclass(frozen=True)
class AdvanceState:
    """Give the computed state to the trainer, then make it our own; answer with CommitApplied.

    Args:
        commit: the commit after which it is the state.
        verdict: the outcomes of our contributions that the commit brings.
    """

    commit: CertifiedCommit
    verdict: ForkOutcome


@dataclass(frozen=True)
class PublishHead:
    """Report and announce the new head, and save; answer with HeadPublished.

    The previous checkpoint must be on disk before another peer learns of this round.
    """

    commit: Commit
    contributions: SignedContributions
    outcome: ContributionOutcome


@dataclass(frozen=True)
class FindPath:
    """Ask a peer for its chain while our round goes on; answer with PathFound or SyncFailed.

    `since`: the first round that may include a contribution of ours. The other chain may include it in a round that
    ended differently on ours, so the commits from there on are wanted unless those after our head continue our chain.
    """

    peer: PeerId
    since: int


@dataclass(frozen=True)
class FetchState:
    """Download a state that nothing has confirmed yet, and keep it; answer with StateFetched or SyncFailed."""

    state: Blob
    holders: tuple[PeerId, ...]


@dataclass(frozen=True)
class TakeState:
    """Download a state from its holders and install it; answer with StateInstalled or SyncFailed."""

    offer: SyncOffer
    state: Blob
    holders: tuple[PeerId, ...]


@dataclass(frozen=True)
class AdoptState:
    """Give the installed state to the trainer, save, and only then report and announce; answer with HeadPublished.

    Args:
        commits: those of the other chain after our old head.
        verdict: the outcomes of our contributions on it.
        skipped: number of rounds that we did not apply ourselves.
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
    """Log and count an error that needs no action."""

    kind: RecoveredErrorKind
    line: str


@dataclass(frozen=True)
class ReportMissed:
    """Report why the open round will have none of our work."""

    reason: str


@dataclass(frozen=True)
class ReportPace:
    """Report how many of the planned steps this peer makes; empty if it makes all."""

    text: str


@dataclass(frozen=True)
class ReportConduct:
    """Report the excluded and struck peers in plain words, a line each."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class SaveProofs:
    """Keep these proofs and convictions on disk, instead of those that are there."""

    proofs: tuple[SignedMessage[Proof], ...]
    convictions: tuple[PeerConvicted, ...] = ()


@dataclass(frozen=True)
class ReportCatchUp:
    """Count rounds that other peers made without us."""

    kind: CatchUpKind
    rounds: int


@dataclass(frozen=True)
class TargetReached:
    """The run has reached its target with this head: stop the trainer and save, but still serve the state.

    `is_ours` is false for a newcomer, which has no state of the run.
    """

    head: ChainHead
    is_ours: bool


@dataclass(frozen=True)
class LeaveRun:
    """Nobody needs this peer any more, or the organiser has extended the run; after TargetReached."""

    is_extended: bool = False


@dataclass(frozen=True)
class RestTrainer:
    """Let the trainer rest, or train again."""

    is_resting: bool


LoopAction = (
    Send
    | SendReply
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
    | PublishStep
    | PublishHead
    | FindPath
    | FetchState
    | TakeState
    | AdoptState
    | ReportPhase
    | ReportRecovered
    | ReportMissed
    | ReportPace
    | ReportCatchUp
    | ReportConduct
    | SaveProofs
    | TargetReached
    | LeaveRun
    | RestTrainer
)


class ActionQueue:
    """Collects the actions of a round loop until they are carried out; a phase that is repeated is reported once."""

    def __init__(self) -> None:
        self._actions: list[LoopAction] = []
        self._phase: ReportPhase | None = None

    def add(self, actions: Iterable[LoopAction]) -> None:
        """Add actions, but for reports of the phase that was reported last."""
        for action in actions:
            if isinstance(action, ReportPhase):
                if action == self._phase:
                    continue
                self._phase = action
            self._actions.append(action)

    def report_phase(self, phase: Phase, reason: str = "") -> None:
        self.add([ReportPhase(phase, reason)])

    def take(self) -> list[LoopAction]:
        """Remove the actions and return them."""
        actions, self._actions = self._actions, []
        return actions

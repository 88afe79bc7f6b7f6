"""Define the events that the stage loop handles, and the actions that it returns. PURE.

Most of them belong to the two state machines inside the loop, the owner of microbatches and the server of a stage. This
module adds the events of the trainer, of the peers' records and of exact steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.pipeline import owner_events, server_events
from protocol.pipeline.exact import SendStatement, Statement, StepReports
from protocol.pipeline.ledger import Ledger
from protocol.pipeline.messages import Answer, Task
from protocol.pipeline.routing import StagePeer

StagePeers = tuple[tuple[StagePeer, ...], ...]  # the live servers of each stage


# Events.


@dataclass(frozen=True)
class TrainerReady:
    """A trainer of the stage has started from its snapshot.

    Attributes:
        wall_ms: milliseconds since 1970; a life that starts there exceeds every life before a restart.
        ledger: microbatches of the steps that the trainer will contribute.
        contributed: microbatches of its last contribution.
        repeats: whether it sends its last contribution again.
    """

    round: int
    wall_ms: int
    ledger: Ledger = field(default_factory=Ledger)
    contributed: Ledger = field(default_factory=Ledger)
    repeats: bool = False
    exact_step: int = 0


@dataclass(frozen=True)
class StageAnchorApplied:
    """The trainer has adopted the weights of a round; `wall_ms` as in TrainerReady."""

    round: int
    wall_ms: int
    exact_step: int = 0


@dataclass(frozen=True)
class StageContributed:
    """The trainer has made a contribution to a round; `ledger` is set for an exact step."""

    round: int
    ledger: bytes = b""


@dataclass(frozen=True)
class TokensDrawn:
    """Answers DrawTokens: the tokens of a microbatch are in memory."""

    serial: int
    blob: Blob


@dataclass(frozen=True)
class PeersSeen:
    """The live servers of each stage, the first serial of each peer's process, and their reports of exact steps.

    `serves_all`: our node serves every stage, so our microbatches visit no other peer. `standing`: the peers that the
    commits of their stages vouch for; None if nothing is known of that.
    """

    stages: StagePeers
    first_serials: Mapping[PeerId, int]
    reports: StepReports
    serves_all: bool = False
    standing: frozenset[PeerId] | None = None


@dataclass(frozen=True)
class TaskAsked:
    """A peer asks for a computation; the loop answers with AnswerTask at once."""

    task: Task


@dataclass(frozen=True)
class StatementReceived:
    """Another server reports what its sum of the exact step contains."""

    peer: PeerId
    statement: Statement


@dataclass(frozen=True)
class RestingChanged:
    """This peer pauses or resumes its own microbatches."""

    is_resting: bool


@dataclass(frozen=True)
class Draining:
    """This peer leaves after finishing the work that peers would have to repeat."""


@dataclass(frozen=True)
class Leaving:
    """This peer leaves now; owners notice it from the answers to their requests."""


@dataclass(frozen=True)
class DeadlinePassed:
    """The time of `StageLoop.next_deadline` has come."""


StageEvent = (
    TrainerReady
    | StageAnchorApplied
    | StageContributed
    | TokensDrawn
    | PeersSeen
    | TaskAsked
    | StatementReceived
    | RestingChanged
    | Draining
    | Leaving
    | DeadlinePassed
    | owner_events.Answered
    | owner_events.AskFailed
    | owner_events.OutcomeReceived
    | owner_events.Invited
    | owner_events.ReleaseFailed
    | owner_events.Probed
    | server_events.InputsFetched
    | server_events.InputMissing
    | server_events.Computed
    | server_events.Stepped
    | server_events.ReleasedBy
    | server_events.CloseStep
)


# Actions.


@dataclass(frozen=True)
class DrawTokens:
    """Let the trainer read a microbatch into memory; `window` of the run's text if steps are exact."""

    serial: int
    window: int | None = None


@dataclass(frozen=True)
class DropTokens:
    """Free the tokens of a microbatch of ours."""

    serial: int


@dataclass(frozen=True)
class AnswerTask:
    """Answer the TaskAsked that is being handled."""

    answer: Answer


@dataclass(frozen=True)
class PublishLife:
    """Publish at once that a new life of our stage has begun, which voids results of earlier lives."""

    life: int
    rate: float


@dataclass(frozen=True)
class PublishRate:
    """Show the measured rate with the next renewal of our record, in microbatches a second."""

    rate: float


@dataclass(frozen=True)
class ReportRefused:
    """Report a microbatch of ours that is dropped because three peers refused it."""

    serial: int


StageAction = (
    DrawTokens
    | DropTokens
    | AnswerTask
    | SendStatement
    | PublishLife
    | PublishRate
    | ReportRefused
    | owner_events.Ask
    | owner_events.Release
    | owner_events.Probe
    | owner_events.StageEmpty
    | owner_events.WrongResult
    | owner_events.ResultsDiffer
    | server_events.FetchInputs
    | server_events.Compute
    | server_events.TakeStep
    | server_events.DropSum
    | server_events.SendOutcome
    | server_events.Invite
    | server_events.Drop
    | server_events.TrainerEnded
)

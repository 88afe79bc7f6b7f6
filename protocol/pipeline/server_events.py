"""Events of the server of a stage, the actions that it returns, and its counters."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.pipeline.ledger import Ledger
from protocol.pipeline.messages import Direction, HeldBlob, Input, Key, Outcome, Task
from protocol.pipeline.results import SignedResult


@dataclass(frozen=True)
class OwnersChanged:
    """The live peers that may own microbatches, with the first serial of each; drop all other microbatches.

    A restarted owner does not know the microbatches of its earlier process, so their serials are below the first.
    `standing`: the owners that each have a share of their own; all others have one share together. None: each has one.
    `me`: the owner at this peer.
    """

    owners: Mapping[PeerId, int]
    standing: frozenset[PeerId] | None = None
    me: PeerId | None = None


@dataclass(frozen=True)
class InputsFetched:
    """The inputs of a task are in memory: the answer to FetchInputs."""

    key: Key
    direction: Direction
    token: int


@dataclass(frozen=True)
class InputMissing:
    """The holder of an input did not deliver it."""

    key: Key
    direction: Direction
    token: int
    missing: Input


@dataclass(frozen=True)
class Computed:
    """A Compute has ended. `valid` is false for an input of another shape, or a value that is not finite.

    `signed`: our signature under the result.
    """

    key: Key
    direction: Direction
    token: int
    valid: bool
    result: Blob | None
    loss: float | None
    compute_ms: float
    clipped: bool = False
    signed: SignedResult | None = None


@dataclass(frozen=True)
class Stepped:
    """The trainer has made the inner step: the answer to TakeStep."""


@dataclass(frozen=True)
class ReleasedBy:
    """An owner's microbatches have ended."""

    owner: PeerId
    serials: tuple[int, ...]


@dataclass(frozen=True)
class TrainerRestarted:
    """The trainer has restarted from its snapshot, with the ledgers of the snapshot and its last contribution."""

    life: int
    ledger: Ledger
    contributed: Ledger = field(default_factory=Ledger)


@dataclass(frozen=True)
class CloseStep:
    """The round needs our contribution early: end the open step without further forwards."""


@dataclass(frozen=True)
class Drain:
    """This peer is leaving: finish the open step and accept nothing else."""


@dataclass(frozen=True)
class RoundChanged:
    """The round of this peer's weights has changed."""

    round: int


Event = (
    OwnersChanged
    | InputsFetched
    | InputMissing
    | Computed
    | Stepped
    | ReleasedBy
    | TrainerRestarted
    | CloseStep
    | Drain
    | RoundChanged
)


@dataclass(frozen=True)
class FetchInputs:
    """Download these blobs into memory; answer with InputsFetched or InputMissing and the same token."""

    key: Key
    direction: Direction
    token: int
    inputs: tuple[tuple[Input, HeldBlob], ...]


@dataclass(frozen=True)
class Compute:
    """Let the trainer compute a task; `adds`: its gradient joins the sum of the open step.

    `takes_away`: its gradient leaves the sum of an exact step, because another server counts it too.
    """

    task: Task
    token: int
    adds: bool
    takes_away: bool = False


@dataclass(frozen=True)
class SendOutcome:
    """Send an outcome to an owner; if it is lost, the owner asks again."""

    owner: PeerId
    outcome: Outcome


@dataclass(frozen=True)
class Invite:
    """Invite an owner that was turned away to send a forward; the message may be lost."""

    owner: PeerId


@dataclass(frozen=True)
class TakeStep:
    """Let the trainer make an inner step with the gradients of these microbatches; answer with Stepped.

    An exact step is a contribution, which has a StepLedger.
    """

    ledger: Ledger


@dataclass(frozen=True)
class DropSum:
    """Make the trainer discard its sum of the exact step and begin again."""


@dataclass(frozen=True)
class Drop:
    """Free all blobs of a microbatch except `kept`."""

    key: Key
    kept: frozenset[Blob] = frozenset()


@dataclass(frozen=True)
class TrainerEnded:
    """The trainer died again during a task of an owner, which is to blame."""

    owner: PeerId


Action = FetchInputs | Compute | SendOutcome | Invite | TakeStep | DropSum | Drop | TrainerEnded


@dataclass
class ServerCounts:
    """Counted results of one server.

    Args:
        withdrawn: microbatches that the open step stopped waiting for: their owner is gone or too late.
        partly_counted: microbatches of lost owners that this stage counts and the first stage may not.
        lost: acknowledged gradients that a crash of the trainer lost.
        duplicates: repeated tasks; nothing was added for them.
        subtracted: gradients taken out of an exact step, because another server counts them too.
        left_behind: microbatches whose owner was so late that the open step went on without them.
        turned_away: forwards of owners that steps had to leave behind.
        without_forward: backwards of owners without forwards here.
        clipped: gradients whose norm was far above the usual.
    """

    computed: int = 0
    steps: int = 0
    withdrawn: int = 0
    partly_counted: int = 0
    lost: int = 0
    duplicates: int = 0
    replayed: int = 0
    invalid: int = 0
    subtracted: int = 0
    left_behind: int = 0
    turned_away: int = 0
    without_forward: int = 0
    clipped: int = 0

    def __post_init__(self) -> None:
        self.answers = Counter[str]()

"""Events of the server of a stage, the actions that it returns, and its counters."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.pipeline.ledger import Ledger
from protocol.pipeline.messages import Direction, HeldBlob, Input, Key, Outcome, Task


@dataclass(frozen=True)
class OwnersChanged:
    """The live peers that may own microbatches, with the first serial of each; all other microbatches are struck.

    An owner that has restarted knows nothing of those that its earlier process began.
    """

    owners: Mapping[PeerId, int]


@dataclass(frozen=True)
class InputsFetched:
    """The inputs of a task are in memory: the answer to FetchInputs."""

    key: Key
    direction: Direction
    token: int


@dataclass(frozen=True)
class InputMissing:
    """An input that its holder did not deliver."""

    key: Key
    direction: Direction
    token: int
    missing: Input


@dataclass(frozen=True)
class Computed:
    """The end of a Compute. `valid` is false for an input of another shape, or a value that is not finite."""

    key: Key
    direction: Direction
    token: int
    valid: bool
    result: Blob | None
    loss: float | None
    compute_ms: float


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
    """The trainer has come back from its snapshot, with its ledger and that of its last contribution."""

    life: int
    ledger: Ledger
    contributed: Ledger = field(default_factory=Ledger)


@dataclass(frozen=True)
class CloseStep:
    """The round asks for an early contribution: the open step ends without further forwards."""


@dataclass(frozen=True)
class Drain:
    """This peer leaves: it finishes the open step and accepts nothing else."""


@dataclass(frozen=True)
class RoundChanged:
    """The round of this peer's weights."""

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
    """Tell an owner that found this server busy that there is room for a forward; it may be lost."""

    owner: PeerId


@dataclass(frozen=True)
class TakeStep:
    """Let the trainer make an inner step with the gradients of these microbatches; answer with Stepped.

    An exact step is a contribution, with a ledger of its own.
    """

    ledger: Ledger


@dataclass(frozen=True)
class DropSum:
    """Let the trainer begin the sum of the exact step again."""


@dataclass(frozen=True)
class Drop:
    """Free all blobs of a microbatch except `kept`."""

    key: Key
    kept: frozenset[Blob] = frozenset()


Action = FetchInputs | Compute | SendOutcome | Invite | TakeStep | DropSum | Drop


@dataclass
class ServerCounts:
    """Counted results of one server.

    Args:
        withdrawn: microbatches that the open step waited for in vain, because their owner is gone or too late.
        partly_counted: microbatches of dead owners that this stage counts and the first stage may not.
        lost: acknowledged gradients that died with the trainer.
        duplicates: repeated tasks, to which nothing was added.
        subtracted: gradients taken out of an exact step, because another server counts them too.
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

    def __post_init__(self) -> None:
        self.answers = Counter[str]()

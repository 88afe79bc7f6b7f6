"""Settings and events of the owner of microbatches, the actions that it returns, and its counters."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.pipeline.messages import Answer, Outcome, Task
from protocol.pipeline.microbatch import DropReason, ServerLife
from protocol.pipeline.results import SignedResult
from protocol.pipeline.routing import StagePeer


@dataclass(frozen=True)
class PeersChanged:
    """The live peers of each stage, and the round of this peer. A peer that is not listed is gone.

    `standing`: the peers that may audit others; None: all.
    """

    stages: tuple[tuple[StagePeer, ...], ...]
    round: int
    standing: frozenset[PeerId] | None = None


@dataclass(frozen=True)
class Answered:
    """The answer to an Ask."""

    peer: PeerId
    task: Task
    answer: Answer


@dataclass(frozen=True)
class AskFailed:
    """An Ask without an answer; `unreachable`: the peer is out of reach or refuses the call, so it has no new task."""

    peer: PeerId
    task: Task
    unreachable: bool


@dataclass(frozen=True)
class OutcomeReceived:
    """An outcome that an authenticated peer sent."""

    peer: PeerId
    outcome: Outcome


@dataclass(frozen=True)
class Invited:
    """A peer that was busy can take forwards of ours again."""

    peer: PeerId
    run: RunId


@dataclass(frozen=True)
class ReleaseFailed:
    """A Release without an answer."""

    peer: PeerId
    stage: int
    serials: frozenset[int]


@dataclass(frozen=True)
class Probed:
    """The end of a Probe."""

    peer: PeerId
    stage: int
    answers: bool


Event = PeersChanged | Answered | AskFailed | OutcomeReceived | Invited | ReleaseFailed | Probed


@dataclass(frozen=True)
class Ask:
    """Send a task, with a deadline of `ASK_SECONDS`; answer with Answered or AskFailed."""

    peer: PeerId
    task: Task


@dataclass(frozen=True)
class Release:
    """Report to a peer that these microbatches have ended."""

    peer: PeerId
    stage: int
    serials: frozenset[int]


@dataclass(frozen=True)
class Probe:
    """Find out whether a server answers, by a Release of nothing within `ASK_SECONDS`; answer with Probed."""

    peer: PeerId
    stage: int


@dataclass(frozen=True)
class Finished:
    """A microbatch that has ended: done with its loss, or dropped for a reason. The owner may drop its tokens.

    `added`: the servers that acknowledged its gradient, by stage.
    """

    serial: int
    loss: float | None
    reason: DropReason | None = None
    added: Mapping[int, ServerLife] = field(default_factory=dict)


@dataclass(frozen=True)
class StageEmpty:
    """Report that microbatches wait for a stage without peers; at most once in `REPORT_SECONDS`."""

    stage: int
    waiting: int


@dataclass(frozen=True)
class WrongResult:
    """Report a peer whose result is missing or has a wrong size."""

    peer: PeerId


@dataclass(frozen=True)
class ResultsDiffer:
    """Report the results of servers of a stage that contradict one another.

    Of three and more, `wrong` are the servers that most contradict. Nobody has checked whether they exclude a key.
    """

    stage: int
    wrong: frozenset[PeerId]
    results: tuple[SignedResult, ...]


Action = Ask | Release | Probe | Finished | StageEmpty | WrongResult | ResultsDiffer


@dataclass
class OwnerCounts:
    """Counted results of the microbatches of one owner.

    Args:
        partly_counted: dropped microbatches that some stages may count and others do not; an upper bound.
        lost: gradients whose server disappeared or restarted before contributing them; an upper bound.
        duplicates: gradients that two servers of a stage count.
        replayed: passes that were computed again.
        outdated: outcomes of an earlier life.
        overdue: tasks that a peer accepted and did not do in several times the expected time.
        audited: results that another server has computed again.
        contradicted: results of audited servers and auditors that most others contradict.
        unaudited: drawn results that no other server could compare.
    """

    done: int = 0
    partly_counted: int = 0
    lost: int = 0
    duplicates: int = 0
    replayed: int = 0
    outdated: int = 0
    overdue: int = 0
    audited: int = 0
    contradicted: int = 0
    unaudited: int = 0

    def __post_init__(self) -> None:
        self.dropped = Counter[str]()
        self.answers = Counter[str]()

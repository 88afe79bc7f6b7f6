"""Events of a run as the host sees it: durable ones for the log, and `PeersUpdated`, which is momentary.

Each durable event is one JSON line of the event log; its index is its line number, from 0. Applying the same events in
the same order gives the same state (`node.dashboard.state`). Times are the host's clock in seconds since the epoch.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from node.commands.eval.results import Result
from protocol.errors import DataError
from protocol.fault_words import describe_value
from protocol.identity import PeerId

MAX_EVENT_BYTES = 1 << 20
MAX_SAMPLE_CHARACTERS = 4000
MAX_RESULTS = 256  # of one event
Count = Annotated[int, Field(ge=0, le=2**53)]
Amount = Annotated[float, Field(ge=0)]
Reach = Literal["direct", "relay", "unknown"]


class EventModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunAbout(EventModel):
    """The manifest's facts for people; `source` names the data set."""

    description: str = ""
    organiser: str = ""
    data: str = ""
    licence: str = ""
    url: str = ""
    source: str = ""


class RunFacts(EventModel):
    """Facts of a run, from its manifest."""

    run: str
    run_id: str
    recipe: str
    parameters: Count
    batch_tokens: Count = Field(description="tokens of one inner step of one peer")
    min_peers: Count
    stages: Annotated[int, Field(ge=1)] = Field(default=1, description="stages of a pipeline; 1: the model is not cut")
    target_rounds: Count | None = None
    target_tokens: Count | None = None
    organiser: PeerId
    expiry: Amount = Field(description="seconds of silence after which a peer is gone")
    about: RunAbout = RunAbout()


class CommittedContribution(EventModel):
    """One peer's contribution to a round; `size` is the number of bytes of its parts."""

    peer: PeerId
    tokens: Count
    steps: Count
    loss: float
    size: Count


class CountedGroups(EventModel):
    """The groups of a rollout peer from which the trainers of a round learned, as the commit counts them."""

    peer: PeerId
    groups: Count
    tokens: Count


class PeerTiming(EventModel):
    """One peer's seconds of compute, exchange and wait in a round, and the bytes that it sent."""

    peer: PeerId
    compute: Amount
    exchange: Amount
    wait: Amount
    sent: Count


class PeerReport(EventModel):
    """The newest report of a peer about itself; the host measures `sending` and `receiving`, in bytes per second."""

    peer: PeerId
    role: Literal["trainer", "observer", "rollout"]
    name: str = ""
    device: str = ""
    version: str = ""
    reach: Reach = "unknown"
    carried: Count = Field(default=0, description="bytes relayed between other peers, by its own account")
    carriers: tuple[PeerId, ...] = Field(default=(), description="peers that relay to it, by its own account")
    round: Count = 0
    step: Count = 0
    tokens: Count = 0
    loss: float | None = None
    tokens_per_second: Amount = 0.0
    bytes_sent: Count = 0
    sending: Amount = 0.0
    receiving: Amount = 0.0
    learning_rate: Amount | None = None
    gradient_norm: Amount | None = None
    device_use: Annotated[float, Field(ge=0, le=1)] | None = None
    device_memory: Count | None = None
    device_memory_total: Count | None = None
    reward: Annotated[float, Field(ge=0, le=1)] | None = Field(default=None, description="mean score of answers")
    rollouts: Count = Field(default=0, description="groups of answers that it learned from, or drew for trainers")
    resting: bool = Field(default=False, description="does not train at the moment")
    stage: Count | None = Field(default=None, description="of a pipeline, from 0 on; None: it serves none")
    stage_rate: Amount = Field(default=0.0, description="microbatches a second that it can compute")
    microbatches: dict[str, Count] = Field(default={}, description="of this owner in a pipeline, by result")
    seen: float = 0.0


class LogOpened(EventModel):
    """The first event of every event log."""

    kind: Literal["opened"] = "opened"
    at: float
    facts: RunFacts


class HostRestarted(EventModel):
    """The host restarted and does not see the previously known peers yet; its manifest may have other facts."""

    kind: Literal["started"] = "started"
    at: float
    facts: RunFacts | None = None


class PeerAppeared(EventModel):
    kind: Literal["joined"] = "joined"
    at: float
    now: PeerReport


class PeerDeparted(EventModel):
    kind: Literal["left"] = "left"
    at: float
    peer: PeerId
    reason: str


class RoundCommitted(EventModel):
    """A committed round; `tokens` counts the chain including it, `at` is `None` if the host learned of it later."""

    kind: Literal["committed"] = "committed"
    at: float | None
    round: Count = Field(description="number of the round, the first is 0")
    base: str = Field(description="chain digest before the round, hexadecimal")
    digest: str
    tokens: Count
    given: tuple[CommittedContribution, ...]
    drawn: tuple[CountedGroups, ...] = ()
    late: tuple[PeerId, ...] = Field(default=(), description="peers that trained but are not included")


class RoundTimed(EventModel):
    kind: Literal["timed"] = "timed"
    at: float
    round: Count
    lanes: tuple[PeerTiming, ...]


class ValidationMeasured(EventModel):
    """The loss of the model on held-out text after `round` rounds."""

    kind: Literal["measured"] = "measured"
    at: float
    peer: PeerId
    round: Count
    loss: float
    by_source: dict[str, float] = {}  # of a mixture, by the names of the sources


class ScoresMeasured(EventModel):
    """The mean score of the answers that trainers had learned from last when round `round` was committed."""

    kind: Literal["scored"] = "scored"
    at: float
    round: Count
    reward: Annotated[float, Field(ge=0, le=1)]


class SampleGenerated(EventModel):
    """Text that the model wrote after `round` rounds, continuing the prompt."""

    kind: Literal["sampled"] = "sampled"
    at: float
    round: Count
    prompt: str = Field(max_length=MAX_SAMPLE_CHARACTERS)
    text: str = Field(max_length=MAX_SAMPLE_CHARACTERS)


class ModelEvaluated(EventModel):
    """Results of `murmur eval` that were noted in the host's folder."""

    kind: Literal["evaluated"] = "evaluated"
    at: float
    results: tuple[Result, ...] = Field(max_length=MAX_RESULTS)


class RevisionReport(EventModel):
    """A revision of the manifest by the organiser; `holds_from` is None while no commit has adopted it."""

    number: Count
    from_round: Count
    changes: dict[str, bool | int | float | str | list[str] | dict[str, float] | None]
    time: Amount
    holds_from: Count | None = None


class RunSteered(EventModel):
    """The organiser's revisions, and the facts of the run with those that are in force; `news` is the log line."""

    kind: Literal["steered"] = "steered"
    at: float
    facts: RunFacts
    revisions: tuple[RevisionReport, ...]
    is_paused: bool = False
    news: str = ""


class PeerDiverged(EventModel):
    """A peer's state differs from that of the other peers at the same chain head."""

    kind: Literal["strayed"] = "strayed"
    at: float
    peer: PeerId
    round: Count


class ChainForked(EventModel):
    """The swarm switched to another chain: the known rounds from this one on are void."""

    kind: Literal["forked"] = "forked"
    at: float
    round: Count


class RoundsMissing(EventModel):
    """Rounds that no peer's log holds any more, because the host was away for too long."""

    kind: Literal["missing"] = "missing"
    at: float
    first: Count
    last: Count


class SwarmLost(EventModel):
    """The host no longer sees any peer of the run."""

    kind: Literal["lost"] = "lost"
    at: float


class SwarmFound(EventModel):
    kind: Literal["found"] = "found"
    at: float


class PeersUpdated(EventModel):
    """New reports of peers; never stored, because the next one replaces it."""

    kind: Literal["moved"] = "moved"
    at: float
    peers: tuple[PeerReport, ...]


LoggedEvent = (
    LogOpened
    | HostRestarted
    | PeerAppeared
    | PeerDeparted
    | RoundCommitted
    | RoundTimed
    | ValidationMeasured
    | ScoresMeasured
    | SampleGenerated
    | ModelEvaluated
    | RunSteered
    | PeerDiverged
    | ChainForked
    | RoundsMissing
    | SwarmLost
    | SwarmFound
)
DashboardEvent = LoggedEvent | PeersUpdated
_LOGGED_EVENT: TypeAdapter[LoggedEvent] = TypeAdapter(Annotated[LoggedEvent, Field(discriminator="kind")])


def read_event(line: bytes, origin: str) -> LoggedEvent:
    """Parse one line of an event log. Raises DataError, one line that names `origin`, if it is not an event."""
    if len(line) > MAX_EVENT_BYTES:
        raise DataError(
            f"{origin}: an event has at most {MAX_EVENT_BYTES} bytes; this is not an event log of `murmur host`"
        )
    try:
        return _LOGGED_EVENT.validate_json(line)
    except ValidationError as error:
        fault = describe_value(error.errors(include_url=False)[0])
        raise DataError(f"{origin} is not an event of `murmur host`: {fault}; name another file") from error

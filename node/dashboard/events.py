"""What happens in a run, as a host sees it: the durable events, and `Moved`, which is only of the moment.

Every durable event is one JSON line of the journal; its index is the number of its line. Who folds the same events in
the same order has the same picture (`node.dashboard.state`). Times are the host's clock, in seconds since the epoch.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from protocol.errors import DataError
from protocol.identity import PeerId

MAX_EVENT_BYTES = 1 << 20
Count = Annotated[int, Field(ge=0, le=2**53)]
Amount = Annotated[float, Field(ge=0)]
Reach = Literal["direct", "relay", "unknown"]


class EventModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunFacts(EventModel):
    """What does not change while a run lives."""

    run: str
    run_id: str
    recipe: str
    parameters: Count
    batch_tokens: Count = Field(description="tokens of one inner step of one peer")
    min_peers: Count
    target_rounds: Count | None = None
    target_tokens: Count | None = None
    organiser: PeerId
    expiry: Amount = Field(description="seconds of silence after which a peer is gone")


class CommittedContribution(EventModel):
    """One peer's contribution to a round; `size` is that of its message, in bytes."""

    peer: PeerId
    tokens: Count
    steps: Count
    loss: float
    size: Count


class PeerTiming(EventModel):
    """Where one peer's seconds of a round went, and the bytes that it sent in it."""

    peer: PeerId
    compute: Amount
    exchange: Amount
    wait: Amount
    sent: Count


class PeerReport(EventModel):
    """What a peer last said of itself. `sending`: bytes a second, as the host measured it."""

    peer: PeerId
    role: Literal["trainer", "observer"]
    name: str = ""
    device: str = ""
    version: str = ""
    reach: Reach = "unknown"
    carried: Count = Field(default=0, description="bytes passed on between others, as it says")
    carriers: tuple[PeerId, ...] = Field(default=(), description="who relays to it, as it says")
    round: Count = 0
    step: Count = 0
    tokens: Count = 0
    loss: float | None = None
    tokens_per_second: Amount = 0.0
    bytes_sent: Count = 0
    sending: Amount = 0.0
    resting: bool = Field(default=False, description="trains no step for now")
    seen: float = 0.0


class LogOpened(EventModel):
    """The first event of every journal."""

    kind: Literal["opened"] = "opened"
    at: float
    facts: RunFacts


class HostRestarted(EventModel):
    """The host was started again; whom it knew before it does not see yet."""

    kind: Literal["started"] = "started"
    at: float


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
    """`tokens`: of the chain after it. `at` is None for a round that the host learned of afterwards."""

    kind: Literal["committed"] = "committed"
    at: float | None
    round: Count = Field(description="number of the round, the first is 0")
    base: str = Field(description="chained digest before it, hexadecimal")
    digest: str
    tokens: Count
    given: tuple[CommittedContribution, ...]
    late: tuple[PeerId, ...] = Field(default=(), description="who trained, and is not among them")


class RoundTimed(EventModel):
    kind: Literal["timed"] = "timed"
    at: float
    round: Count
    lanes: tuple[PeerTiming, ...]


class ValidationMeasured(EventModel):
    """The loss on held-out text of the model after so many rounds."""

    kind: Literal["measured"] = "measured"
    at: float
    peer: PeerId
    round: Count
    loss: float


class PeerDiverged(EventModel):
    """A peer's state differs from that of the others at the same point of the chain."""

    kind: Literal["strayed"] = "strayed"
    at: float
    peer: PeerId
    round: Count


class ChainForked(EventModel):
    """The swarm went over to another chain: what was known from that round on is void."""

    kind: Literal["forked"] = "forked"
    at: float
    round: Count


class RoundsMissing(EventModel):
    """Rounds that no peer's log holds any more: the host was away for too long."""

    kind: Literal["missing"] = "missing"
    at: float
    first: Count
    last: Count


class SwarmLost(EventModel):
    """The host sees nobody of the run any more."""

    kind: Literal["lost"] = "lost"
    at: float


class SwarmFound(EventModel):
    kind: Literal["found"] = "found"
    at: float


class PeersUpdated(EventModel):
    """Peers that said something new. Never in the journal: the next one says it better."""

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
    | PeerDiverged
    | ChainForked
    | RoundsMissing
    | SwarmLost
    | SwarmFound
)
DashboardEvent = LoggedEvent | PeersUpdated
_LOGGED_EVENT: TypeAdapter[LoggedEvent] = TypeAdapter(Annotated[LoggedEvent, Field(discriminator="kind")])


def read_event(line: bytes, origin: str) -> LoggedEvent:
    """Raises DataError, one line that names `origin`, for anything that no journal holds."""
    if len(line) > MAX_EVENT_BYTES:
        raise DataError(f"{origin}: an event has at most {MAX_EVENT_BYTES} bytes; this is no journal of `murmur host`")
    try:
        return _LOGGED_EVENT.validate_json(line)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise DataError(f"{origin} is no event of `murmur host`: {fault['msg']}; name another file") from error

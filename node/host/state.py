"""A run as its host knows it: `apply(state, event)` gives the next state, and nothing else changes one.

PURE. What grows is bounded: the log and the timelines to the newest, those who left to the last few. The history of
rounds is kept whole, in chunks that later states share, so that a round costs little whatever came before it.

The baseline of a round is what each peer would have sent with a ring all-reduce of the fp32 gradient at every step:
    2 (n - 1) / n * 4 bytes * parameters * steps,   n contributors, steps = their mean
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from node.host.events import (
    Committed,
    Event,
    Facts,
    Forked,
    Found,
    Given,
    Joined,
    Lane,
    Left,
    Lost,
    Measured,
    Missing,
    Moved,
    Opened,
    PeerNow,
    Started,
    Strayed,
    Timed,
)
from node.host.words import Said, Tone, sentence
from protocol.identity import PeerId

KEPT_LINES = 200
KEPT_TIMELINES = 50
KEPT_SPEEDS = 20
KEPT_GONE = 200
CHUNK = 256
FLOAT_BYTES = 4
UNSEEN = "not seen since the host was started again"


@dataclass(frozen=True, slots=True)
class Peer:
    """`given`, `missed`: rounds with and without its contribution while it was seen to train."""

    now: PeerNow
    since: float
    gone: float | None = None
    reason: str = ""
    given: int = 0
    missed: int = 0
    in_time: bool = True
    speeds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One committed round. `message`, `raw`, `sent`: bytes a peer; `seconds`: since the round before.

    `sent` and `validation` (of the model after this round) are measured later, or never.
    """

    round: int
    at: float | None
    digest: str
    tokens: int
    loss: float
    contributors: int
    late: int
    message: float
    raw: float
    seconds: float | None
    sent: float | None = None
    validation: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    index: int
    at: float
    peer: PeerId | None
    text: str
    tone: Tone


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in the order of their rounds; appending copies only the last chunk."""

    chunks: tuple[tuple[Row, ...], ...] = ()
    tail: tuple[Row, ...] = ()

    def __len__(self) -> int:
        return len(self.chunks) * CHUNK + len(self.tail)

    def __iter__(self) -> Iterator[Row]:
        for chunk in self.chunks:
            yield from chunk
        yield from self.tail

    @property
    def last(self) -> Row | None:
        return self.tail[-1] if self.tail else self.chunks[-1][-1] if self.chunks else None

    def recent(self, count: int) -> tuple[Row, ...]:
        """At most `count`, and at most two chunks of them."""
        return ((*self.chunks[-1], *self.tail) if self.chunks else self.tail)[-count:]

    def append(self, row: Row) -> "Rows":
        tail = (*self.tail, row)
        return Rows((*self.chunks, tail), ()) if len(tail) == CHUNK else Rows(self.chunks, tail)

    def find(self, number: int) -> Row | None:
        """A recent one."""
        return next((row for row in self.recent(2 * CHUNK) if row.round == number), None)

    def amend(self, row: Row) -> "Rows":
        """With that row instead of the recent one of the same round."""
        tail = tuple(row if old.round == row.round else old for old in self.tail)
        if not self.chunks:
            return Rows((), tail)
        chunk = tuple(row if old.round == row.round else old for old in self.chunks[-1])
        return Rows((*self.chunks[:-1], chunk), tail)

    def before(self, number: int) -> "Rows":
        """Without that round and what follows it."""
        kept = [row for row in self if row.round < number]
        full = len(kept) - len(kept) % CHUNK
        chunks = tuple(tuple(kept[start : start + CHUNK]) for start in range(0, full, CHUNK))
        return Rows(chunks, tuple(kept[full:]))


@dataclass(frozen=True, slots=True)
class State:
    """`index`: how many durable events it is made of; `newest`: when the last of them was.

    `sent`, `raw`: sums over the rounds of which both are known.
    """

    index: int = 0
    newest: float = 0.0
    facts: Facts | None = None
    opened: float = 0.0
    peers: Mapping[PeerId, Peer] = field(default_factory=dict)
    rows: Rows = Rows()
    sent: float = 0.0
    raw: float = 0.0
    timelines: tuple[Timed, ...] = ()
    log: tuple[Line, ...] = ()
    lost: float | None = None
    missing: int = 0

    @property
    def live(self) -> dict[PeerId, Peer]:
        return {name: peer for name, peer in self.peers.items() if peer.gone is None}

    @property
    def trainers(self) -> list[Peer]:
        return [peer for peer in self.live.values() if peer.now.role == "trainer"]


def apply(state: State, event: Event) -> State:
    """The state after the event."""
    if isinstance(event, Moved):
        return _moved(state, event)
    after = replace(_changed(state, event), index=state.index + 1, newest=event.at or state.newest)
    said = said_of(state, event)
    if said is None:
        return after
    line = Line(state.index, event.at or state.opened, getattr(event, "peer", None), said.text, said.tone)
    return replace(after, log=(*state.log, line)[-KEPT_LINES:])


def said_of(state: State, event: Event) -> Said | None:
    """What the log tells of it. That a peer is seen again after the host's own start is no news."""
    if isinstance(event, Joined):
        known = state.peers.get(event.now.peer)
        if known is not None and known.reason == UNSEEN:
            return None
    return sentence(event, {name: peer.now.name for name, peer in state.peers.items()})


def _changed(state: State, event: Event) -> State:
    match event:
        case Opened():
            return replace(state, facts=event.facts, opened=event.at)
        case Started():
            return _all_gone(state, event.at)
        case Joined():
            return _joined(state, event)
        case Left():
            return _left(state, event)
        case Committed():
            return _committed(state, event)
        case Timed():
            return _timed(state, event)
        case Measured():
            return _measured(state, event)
        case Forked():
            return _forked(state, event)
        case Missing():
            return replace(state, missing=state.missing + event.last - event.first + 1)
        case Lost():
            return replace(state, lost=event.at)
        case Found():
            return replace(state, lost=None)
        case Strayed() | Moved():
            return state


def _moved(state: State, event: Moved) -> State:
    peers = dict(state.peers)
    for now in event.peers:
        known = peers.get(now.peer)
        if known is not None and known.gone is None:
            peers[now.peer] = replace(known, now=now)
    return replace(state, peers=peers)


def _joined(state: State, event: Joined) -> State:
    known = state.peers.get(event.now.peer)
    if known is None:
        peer = Peer(event.now, event.at)
    else:
        peer = replace(known, now=event.now, since=event.at, gone=None, reason="", speeds=())
    others = {name: other for name, other in state.peers.items() if name != event.now.peer}
    return replace(state, peers={**others, event.now.peer: peer})


def _left(state: State, event: Left) -> State:
    known = state.peers.get(event.peer)
    if known is None:
        return state
    others = {name: peer for name, peer in state.peers.items() if name != event.peer}
    gone = replace(known, gone=event.at, reason=event.reason)
    return replace(state, peers=_pruned({**others, event.peer: gone}))


def _all_gone(state: State, at: float) -> State:
    peers = {
        name: peer if peer.gone is not None else replace(peer, gone=at, reason=UNSEEN)
        for name, peer in state.peers.items()
    }
    return replace(state, peers=_pruned(peers))


def _pruned(peers: Mapping[PeerId, Peer]) -> dict[PeerId, Peer]:
    gone = [name for name, peer in peers.items() if peer.gone is not None]
    forgotten = set(gone[: max(0, len(gone) - KEPT_GONE)])
    return {name: peer for name, peer in peers.items() if name not in forgotten}


def _committed(state: State, event: Committed) -> State:
    peers, row = dict(state.peers), _row(state, event)
    for given in event.given:
        if given.peer in peers:
            peers[given.peer] = _included(peers[given.peer], given, row)
    for name in set(event.late) & peers.keys():
        peers[name] = replace(peers[name], missed=peers[name].missed + 1, in_time=False)
    return replace(state, peers=peers, rows=state.rows.append(row))


def _included(peer: Peer, given: Given, row: Row) -> Peer:
    """Where nothing else is known of a peer, as in a replay, its contributions tell where it stands."""
    known = {"round": max(peer.now.round, row.round + 1), "loss": given.loss}
    if not peer.now.tokens_per_second and row.seconds:
        known["tokens_per_second"] = given.tokens / row.seconds
    now = peer.now.model_copy(update=known)
    speeds = (*peer.speeds, now.tokens_per_second)[-KEPT_SPEEDS:]
    return replace(peer, now=now, given=peer.given + 1, in_time=True, speeds=speeds)


def _row(state: State, event: Committed) -> Row:
    given, tokens = event.given, sum(given.tokens for given in event.given)
    count = max(1, len(given))
    return Row(
        round=event.round,
        at=event.at,
        digest=event.digest,
        tokens=event.tokens,
        loss=sum(one.loss * one.tokens for one in given) / max(1, tokens),
        contributors=len(given),
        late=len(event.late),
        message=sum(one.size for one in given) / count,
        raw=_baseline(state.facts, count, sum(one.steps for one in given) / count),
        seconds=_seconds(state.rows.last, event),
    )


def _seconds(last: Row | None, event: Committed) -> float | None:
    """That the round took; None where its beginning or its end is not known."""
    if last is None or last.round != event.round - 1 or last.at is None or event.at is None:
        return None
    return event.at - last.at


def _baseline(facts: Facts | None, peers: int, steps: float) -> float:
    return 2 * (peers - 1) / peers * FLOAT_BYTES * (facts.parameters if facts else 0) * steps


def _timed(state: State, event: Timed) -> State:
    after = replace(state, timelines=(*state.timelines, event)[-KEPT_TIMELINES:])
    row = state.rows.find(event.round)
    if row is None or not event.lanes:
        return after
    mean = sum(lane.sent for lane in event.lanes) / len(event.lanes)
    rows = state.rows.amend(replace(row, sent=mean))
    return replace(after, rows=rows, sent=state.sent + mean, raw=state.raw + row.raw)


def _measured(state: State, event: Measured) -> State:
    row = state.rows.find(event.round - 1)
    return state if row is None else replace(state, rows=state.rows.amend(replace(row, validation=event.loss)))


def _forked(state: State, event: Forked) -> State:
    timelines = tuple(timed for timed in state.timelines if timed.round < event.round)
    return replace(state, rows=state.rows.before(event.round), timelines=timelines)


def lanes_of(state: State, number: int | None) -> tuple[int | None, tuple[Lane, ...]]:
    """The timeline of that round (default: the newest that is known), and its number."""
    found = [timed for timed in state.timelines if number is None or timed.round == number]
    return (found[-1].round, found[-1].lanes) if found else (number, ())

"""The run as its host knows it: `apply_event(state, event)` returns the next state. States are immutable. Pure.

The log, the timelines and the departed peers are bounded to the newest. The history of rounds is complete, in chunks
that later states share, so that the cost of a round does not depend on the number of earlier ones.

The baseline of a round is the number of bytes that each peer would have sent with a ring all-reduce of the fp32
gradient at every step:
    2 (n - 1) / n * 4 bytes * parameters * steps,   n contributors, steps = their mean
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from node.dashboard.events import (
    ChainForked,
    CommittedContribution,
    DashboardEvent,
    HostRestarted,
    LogOpened,
    PeerAppeared,
    PeerDeparted,
    PeerDiverged,
    PeerReport,
    PeersUpdated,
    PeerTiming,
    RoundCommitted,
    RoundsMissing,
    RoundTimed,
    RunFacts,
    SwarmFound,
    SwarmLost,
    ValidationMeasured,
)
from node.dashboard.log_text import LogText, Tone, describe_event
from protocol.identity import PeerId

MAX_LOG_LINES = 200
MAX_TIMELINES = 50
MAX_SPEEDS = 20
MAX_GONE_PEERS = 200
CHUNK_ROWS = 256
FLOAT_BYTES = 4
UNSEEN_SINCE_RESTART = "not seen since the host restarted"


@dataclass(frozen=True, slots=True)
class PeerHistory:
    """A peer and its past; the counts are of rounds with and without its contribution while the host saw it train."""

    report: PeerReport
    since: float
    gone_at: float | None = None
    reason: str = ""
    included_count: int = 0
    missed_count: int = 0
    in_time: bool = True
    speeds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """One committed round; the byte counts are per peer, `seconds` is the time since the previous round.

    `sent_bytes` and `validation_loss` (of the model after this round) are measured later, or never.
    """

    round: int
    at: float | None
    digest: str
    tokens: int
    loss: float
    contributors: int
    late_count: int
    contribution_bytes: float
    all_reduce_bytes: float
    seconds: float | None
    sent_bytes: float | None = None
    validation_loss: float | None = None


@dataclass(frozen=True, slots=True)
class LogLine:
    index: int
    at: float
    peer: PeerId | None
    text: str
    tone: Tone


@dataclass(frozen=True, slots=True)
class RoundHistory:
    """The committed rounds in order; appending copies only the last chunk."""

    chunks: tuple[tuple[RoundSummary, ...], ...] = ()
    tail: tuple[RoundSummary, ...] = ()

    def __len__(self) -> int:
        return len(self.chunks) * CHUNK_ROWS + len(self.tail)

    def __iter__(self) -> Iterator[RoundSummary]:
        for chunk in self.chunks:
            yield from chunk
        yield from self.tail

    @property
    def last(self) -> RoundSummary | None:
        return self.tail[-1] if self.tail else self.chunks[-1][-1] if self.chunks else None

    def recent(self, count: int) -> tuple[RoundSummary, ...]:
        """Return the last `count` rows, limited to the last one to two chunks."""
        return ((*self.chunks[-1], *self.tail) if self.chunks else self.tail)[-count:]

    def append(self, row: RoundSummary) -> "RoundHistory":
        """Return the history with one more row."""
        tail = (*self.tail, row)
        return RoundHistory((*self.chunks, tail), ()) if len(tail) == CHUNK_ROWS else RoundHistory(self.chunks, tail)

    def find(self, round_number: int) -> RoundSummary | None:
        """Return the row of a recent round; `None` if it is unknown or too old."""
        return next((row for row in self.recent(2 * CHUNK_ROWS) if row.round == round_number), None)

    def replace_row(self, row: RoundSummary) -> "RoundHistory":
        """Return the history with `row` in place of the recent row of the same round."""
        tail = tuple(row if old.round == row.round else old for old in self.tail)
        if not self.chunks:
            return RoundHistory((), tail)
        chunk = tuple(row if old.round == row.round else old for old in self.chunks[-1])
        return RoundHistory((*self.chunks[:-1], chunk), tail)

    def truncate_from(self, round_number: int) -> "RoundHistory":
        """Return the history without this round and later ones."""
        kept = [row for row in self if row.round < round_number]
        full = len(kept) - len(kept) % CHUNK_ROWS
        chunks = tuple(tuple(kept[start : start + CHUNK_ROWS]) for start in range(0, full, CHUNK_ROWS))
        return RoundHistory(chunks, tuple(kept[full:]))


@dataclass(frozen=True, slots=True)
class RunState:
    """The state after `index` durable events, the last of them at `newest_at`.

    `sent_bytes` and `all_reduce_bytes` are sums over the rounds for which both are known.
    """

    index: int = 0
    newest_at: float = 0.0
    facts: RunFacts | None = None
    opened_at: float = 0.0
    peers: Mapping[PeerId, PeerHistory] = field(default_factory=dict)
    rows: RoundHistory = RoundHistory()
    sent_bytes: float = 0.0
    all_reduce_bytes: float = 0.0
    timelines: tuple[RoundTimed, ...] = ()
    log: tuple[LogLine, ...] = ()
    lost_since: float | None = None
    missing_rounds: int = 0

    @property
    def live(self) -> dict[PeerId, PeerHistory]:
        return {name: peer for name, peer in self.peers.items() if peer.gone_at is None}

    @property
    def trainers(self) -> list[PeerHistory]:
        return [peer for peer in self.live.values() if peer.report.role == "trainer"]


def apply_event(state: RunState, event: DashboardEvent) -> RunState:
    """Return the state after the event."""
    if isinstance(event, PeersUpdated):
        return _apply_updates(state, event)
    after = replace(_apply_logged(state, event), index=state.index + 1, newest_at=event.at or state.newest_at)
    log_text = log_text_of(state, event)
    if log_text is None:
        return after
    line = LogLine(state.index, event.at or state.opened_at, getattr(event, "peer", None), log_text.text, log_text.tone)
    return replace(after, log=(*state.log, line)[-MAX_LOG_LINES:])


def log_text_of(state: RunState, event: DashboardEvent) -> LogText | None:
    """Return the log text of the event; `None` for a peer that is merely seen again after the host's restart."""
    if isinstance(event, PeerAppeared):
        known = state.peers.get(event.now.peer)
        if known is not None and known.reason == UNSEEN_SINCE_RESTART:
            return None
    return describe_event(event, {name: peer.report.name for name, peer in state.peers.items()})


def _apply_logged(state: RunState, event: DashboardEvent) -> RunState:
    match event:
        case LogOpened():
            return replace(state, facts=event.facts, opened_at=event.at)
        case HostRestarted():
            return _mark_all_gone(state, event.at)
        case PeerAppeared():
            return _apply_joined(state, event)
        case PeerDeparted():
            return _apply_left(state, event)
        case RoundCommitted():
            return _apply_committed(state, event)
        case RoundTimed():
            return _apply_timed(state, event)
        case ValidationMeasured():
            return _apply_measured(state, event)
        case ChainForked():
            return _apply_forked(state, event)
        case RoundsMissing():
            return replace(state, missing_rounds=state.missing_rounds + event.last - event.first + 1)
        case SwarmLost():
            return replace(state, lost_since=event.at)
        case SwarmFound():
            return replace(state, lost_since=None)
        case PeerDiverged() | PeersUpdated():
            return state


def _apply_updates(state: RunState, event: PeersUpdated) -> RunState:
    peers = dict(state.peers)
    for now in event.peers:
        known = peers.get(now.peer)
        if known is not None and known.gone_at is None:
            peers[now.peer] = replace(known, report=now)
    return replace(state, peers=peers)


def _apply_joined(state: RunState, event: PeerAppeared) -> RunState:
    known = state.peers.get(event.now.peer)
    if known is None:
        peer = PeerHistory(event.now, event.at)
    else:
        peer = replace(known, report=event.now, since=event.at, gone_at=None, reason="", speeds=())
    others = {name: other for name, other in state.peers.items() if name != event.now.peer}
    return replace(state, peers={**others, event.now.peer: peer})


def _apply_left(state: RunState, event: PeerDeparted) -> RunState:
    known = state.peers.get(event.peer)
    if known is None:
        return state
    others = {name: peer for name, peer in state.peers.items() if name != event.peer}
    gone = replace(known, gone_at=event.at, reason=event.reason)
    return replace(state, peers=_prune_gone({**others, event.peer: gone}))


def _mark_all_gone(state: RunState, at: float) -> RunState:
    peers = {
        name: peer if peer.gone_at is not None else replace(peer, gone_at=at, reason=UNSEEN_SINCE_RESTART)
        for name, peer in state.peers.items()
    }
    return replace(state, peers=_prune_gone(peers))


def _prune_gone(peers: Mapping[PeerId, PeerHistory]) -> dict[PeerId, PeerHistory]:
    gone = [name for name, peer in peers.items() if peer.gone_at is not None]
    forgotten = set(gone[: max(0, len(gone) - MAX_GONE_PEERS)])
    return {name: peer for name, peer in peers.items() if name not in forgotten}


def _apply_committed(state: RunState, event: RoundCommitted) -> RunState:
    peers, row = dict(state.peers), _summarize_round(state, event)
    for contribution in event.given:
        if contribution.peer in peers:
            peers[contribution.peer] = _count_included(peers[contribution.peer], contribution, row)
    for name in set(event.late) & peers.keys():
        peers[name] = replace(peers[name], missed_count=peers[name].missed_count + 1, in_time=False)
    return replace(state, peers=peers, rows=state.rows.append(row))


def _count_included(peer: PeerHistory, contribution: CommittedContribution, row: RoundSummary) -> PeerHistory:
    """Count an included contribution, and derive the peer's report from it if nothing else is known (replay)."""
    known = {"round": max(peer.report.round, row.round + 1), "loss": contribution.loss}
    if not peer.report.tokens_per_second and row.seconds:
        known["tokens_per_second"] = contribution.tokens / row.seconds
    now = peer.report.model_copy(update=known)
    speeds = (*peer.speeds, now.tokens_per_second)[-MAX_SPEEDS:]
    return replace(peer, report=now, included_count=peer.included_count + 1, in_time=True, speeds=speeds)


def _summarize_round(state: RunState, event: RoundCommitted) -> RoundSummary:
    contributions, tokens = event.given, sum(contribution.tokens for contribution in event.given)
    count = max(1, len(contributions))
    return RoundSummary(
        round=event.round,
        at=event.at,
        digest=event.digest,
        tokens=event.tokens,
        loss=sum(one.loss * one.tokens for one in contributions) / max(1, tokens),
        contributors=len(contributions),
        late_count=len(event.late),
        contribution_bytes=sum(one.size for one in contributions) / count,
        all_reduce_bytes=_all_reduce_bytes(state.facts, count, sum(one.steps for one in contributions) / count),
        seconds=_round_seconds(state.rows.last, event),
    )


def _round_seconds(last: RoundSummary | None, event: RoundCommitted) -> float | None:
    """Return the duration of the round; `None` if its start or its end is unknown."""
    if last is None or last.round != event.round - 1 or last.at is None or event.at is None:
        return None
    return event.at - last.at


def _all_reduce_bytes(facts: RunFacts | None, peers: int, steps: float) -> float:
    return 2 * (peers - 1) / peers * FLOAT_BYTES * (facts.parameters if facts else 0) * steps


def _apply_timed(state: RunState, event: RoundTimed) -> RunState:
    after = replace(state, timelines=(*state.timelines, event)[-MAX_TIMELINES:])
    row = state.rows.find(event.round)
    if row is None or not event.lanes:
        return after
    mean = sum(lane.sent for lane in event.lanes) / len(event.lanes)
    rows = state.rows.replace_row(replace(row, sent_bytes=mean))
    return replace(
        after,
        rows=rows,
        sent_bytes=state.sent_bytes + mean,
        all_reduce_bytes=state.all_reduce_bytes + row.all_reduce_bytes,
    )


def _apply_measured(state: RunState, event: ValidationMeasured) -> RunState:
    row = state.rows.find(event.round - 1)
    return (
        state if row is None else replace(state, rows=state.rows.replace_row(replace(row, validation_loss=event.loss)))
    )


def _apply_forked(state: RunState, event: ChainForked) -> RunState:
    timelines = tuple(timed for timed in state.timelines if timed.round < event.round)
    return replace(state, rows=state.rows.truncate_from(event.round), timelines=timelines)


def timings_of_round(state: RunState, round_number: int | None) -> tuple[int | None, tuple[PeerTiming, ...]]:
    """Return the number and the timeline of a round; `None` means the newest known one."""
    found = [timed for timed in state.timelines if round_number is None or timed.round == round_number]
    return (found[-1].round, found[-1].lanes) if found else (round_number, ())

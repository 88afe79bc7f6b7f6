"""The run as its host knows it: `apply_event(state, event)` returns the next state. States are immutable. Pure.

The log, the timelines and the departed peers are bounded to the newest. The history of rounds is complete, in chunks
that later states share, so that the cost of a round does not depend on the number of earlier ones.

The baseline of a round is the number of bytes that each peer would have sent with a ring all-reduce of the fp32
gradient at every step:
    2 (n - 1) / n * 4 bytes * parameters * steps,   n contributors, steps = their mean
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from node.commands.eval.results import Result
from node.dashboard.contributors import Contributors, mean_seconds
from node.dashboard.events import (
    ChainForked,
    CommittedContribution,
    DashboardEvent,
    HostRestarted,
    LogOpened,
    ModelEvaluated,
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
    RunSteered,
    SampleGenerated,
    ScoresMeasured,
    SwarmFound,
    SwarmLost,
    ValidationMeasured,
)
from node.dashboard.log_text import LEFT_POLITELY, LogLine, LogText, append_line, describe_event
from node.dashboard.rounds import LossTrend, RoundHistory, RoundSummary, progress_to_target, trend_of, was_stopped
from node.monitoring.stage_table import StageEntry, StageReport, build_stage_table
from protocol.identity import PeerId

MAX_TIMELINES = 50
MAX_SPEEDS = 20
MAX_GONE_PEERS = 200
MAX_EVALUATIONS = 1000  # results of `murmur eval`
PACE_ROUNDS = 8  # over which the duration of an undated round is estimated
FLOAT_BYTES = 4
UNSEEN_SINCE_RESTART = "not seen since the host restarted"


def served_stages(facts: RunFacts | None, reports: Iterable[PeerReport]) -> tuple[StageEntry, ...]:
    """Return the stages of a run that is cut; empty for another run."""
    if facts is None or facts.stages == 1:
        return ()
    served = [(report, report.stage) for report in reports if report.role == "trainer"]
    peers = [
        StageReport(stage, report.stage_rate, report.round)
        for report, stage in served
        if stage is not None and stage < facts.stages
    ]
    return build_stage_table(peers, [0] * facts.stages)


def lowest_sum(stages: int, figures: Iterable[tuple[int | None, float]]) -> float:
    """Return the lowest sum of a stage, for example of tokens, because each token passes all stages.

    `figures` has the stage and the figure of each peer.
    """
    sums = [0.0] * stages
    for stage, figure in figures:
        if stage is not None and stage < stages:
            sums[stage] += figure
    return min(sums)


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

    @property
    def has_left_politely(self) -> bool:
        return self.gone_at is not None and self.reason == LEFT_POLITELY


@dataclass(frozen=True, slots=True)
class RunState:
    """The state after `index` durable events, the last of them at `newest_at`.

    `sent_bytes` and `all_reduce_bytes` are sums over the rounds for which both are known. `past_names` are those of
    contributors that are no longer among `peers`. The rounds of a pipeline are those of its last stage.
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
    contributors: Contributors = Contributors()
    trend: LossTrend = LossTrend()
    sample: SampleGenerated | None = None
    evaluations: tuple[Result, ...] = ()
    steered: RunSteered | None = None
    lost_since: float | None = None
    missing_rounds: int = 0
    past_names: Mapping[PeerId, str] = field(default_factory=dict)

    def name_of(self, peer: PeerId) -> str:
        """Return the name of a peer, also if it is gone and no longer among `peers`; empty if it has none."""
        known = self.peers.get(peer)
        return known.report.name if known else self.past_names.get(peer, "")

    @property
    def live(self) -> dict[PeerId, PeerHistory]:
        return {name: peer for name, peer in self.peers.items() if peer.gone_at is None}

    @property
    def trainers(self) -> list[PeerHistory]:
        return [peer for peer in self.live.values() if peer.report.role == "trainer"]

    @property
    def chain_trainers(self) -> list[PeerHistory]:
        """Return the trainers that make the known rounds; of a pipeline, those of the last stage."""
        stages = self.facts.stages if self.facts else 1
        return [peer for peer in self.trainers if stages == 1 or peer.report.stage == stages - 1]

    @property
    def stages(self) -> tuple[StageEntry, ...]:
        """Return the stages of a pipeline with their live peers; empty if the model is not cut."""
        return served_stages(self.facts, (peer.report for peer in self.live.values()))

    @property
    def round(self) -> int:
        """Return the number of committed rounds."""
        return self.rows.last.round + 1 if self.rows.last is not None else 0

    @property
    def has_begun(self) -> bool:
        return self.round > 0

    @property
    def progress(self) -> float | None:
        """Return the progress from 0 to 1; `None` for a run without a target."""
        return progress_to_target(self.facts, self.rows.last)

    @property
    def is_over(self) -> bool:
        """Return whether the run has reached its target."""
        return self.progress == 1.0

    @property
    def is_paused(self) -> bool:
        """Return whether the organiser has paused the run."""
        return self.steered is not None and self.steered.is_paused and not self.is_over

    @property
    def was_stopped(self) -> bool:
        """Return whether the run is over because its organiser stopped it."""
        return self.is_over and was_stopped(self.steered)

    @property
    def have_all_left(self) -> bool:
        """Return whether there were trainers, all are gone, and the last of them said goodbye."""
        moments = [peer.gone_at for peer in self.peers.values() if peer.report.role == "trainer"]
        known = [moment for moment in moments if moment is not None]
        if not known or len(known) < len(moments):
            return False
        last = [peer for peer in self.peers.values() if peer.report.role == "trainer" and peer.gone_at == max(known)]
        return all(peer.has_left_politely for peer in last)


def apply_event(state: RunState, event: DashboardEvent) -> RunState:
    """Return the state after the event."""
    if isinstance(event, PeersUpdated):
        return _apply_updates(state, event)
    after = replace(_apply_logged(state, event), index=state.index + 1, newest_at=event.at or state.newest_at)
    log_text = _log_text_of(state, event)
    if log_text is None:
        return after
    at, peer = event.at or state.opened_at, getattr(event, "peer", None)
    if isinstance(event, PeerAppeared):
        peer = event.now.peer
    line = LogLine(state.index, state.index, at, peer, log_text.text, log_text.tone)
    return replace(after, log=append_line(state.log, line, event, _names(state)))


def newest_line(state: RunState) -> LogLine | None:
    """Return the log line that the newest durable event made; None if it made none."""
    return state.log[-1] if state.log and state.log[-1].index == state.index - 1 else None


def _names(state: RunState) -> dict[PeerId, str]:
    return {name: peer.report.name for name, peer in state.peers.items()}


def _log_text_of(state: RunState, event: DashboardEvent) -> LogText | None:
    """Return the log text of the event; `None` for a peer that is merely seen again after the host's restart.

    A peer that goes after the end of the run has left, however it went.
    """
    if state.is_over and isinstance(event, PeerDeparted):
        event = event.model_copy(update={"reason": LEFT_POLITELY})
    if isinstance(event, PeerAppeared):
        known = state.peers.get(event.now.peer)
        if known is not None and known.reason == UNSEEN_SINCE_RESTART:
            return None
    return describe_event(event, _names(state))


def _apply_logged(state: RunState, event: DashboardEvent) -> RunState:
    match event:
        case LogOpened():
            return replace(state, facts=event.facts, opened_at=event.at)
        case HostRestarted():
            return replace(_mark_all_gone(state, event.at), facts=event.facts or state.facts)
        case PeerAppeared():
            return _apply_joined(state, event)
        case PeerDeparted():
            return _apply_left(state, event)
        case RoundCommitted():
            return _apply_committed(state, event)
        case RoundTimed():
            return _apply_timed(state, event)
        case ScoresMeasured():
            return _apply_scored(state, event)
        case ValidationMeasured():
            return _apply_measured(state, event)
        case ChainForked():
            return _apply_forked(state, event)
        case RoundsMissing():
            return replace(state, missing_rounds=state.missing_rounds + event.last - event.first + 1)
        case SampleGenerated():
            return replace(state, sample=event)
        case ModelEvaluated():
            return replace(state, evaluations=(*state.evaluations, *event.results)[-MAX_EVALUATIONS:])
        case RunSteered():
            return replace(state, steered=event, facts=event.facts)
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
    return _prune_gone(state, {**others, event.peer: gone})


def _mark_all_gone(state: RunState, at: float) -> RunState:
    peers = {
        name: peer if peer.gone_at is not None else replace(peer, gone_at=at, reason=UNSEEN_SINCE_RESTART)
        for name, peer in state.peers.items()
    }
    return _prune_gone(state, peers)


def _prune_gone(state: RunState, peers: Mapping[PeerId, PeerHistory]) -> RunState:
    """Return the state with these peers, less the oldest of many that are gone; names of contributors are kept."""
    gone = [name for name, peer in peers.items() if peer.gone_at is not None]
    forgotten = gone[: max(0, len(gone) - MAX_GONE_PEERS)]
    names = {peer: peers[peer].report.name for peer in forgotten if peers[peer].report.name}
    kept = {peer: name for peer, name in {**state.past_names, **names}.items() if peer in state.contributors.by_peer}
    shown = {name: peer for name, peer in peers.items() if name not in set(forgotten)}
    return replace(state, peers=shown, past_names=kept if forgotten else state.past_names)


def _apply_committed(state: RunState, event: RoundCommitted) -> RunState:
    peers, row = dict(state.peers), _summarize_round(state, event)
    for contribution in event.given:
        if contribution.peer in peers:
            peers[contribution.peer] = _count_included(peers[contribution.peer], contribution, row)
    for name in set(event.late) & peers.keys():
        peers[name] = replace(peers[name], missed_count=peers[name].missed_count + 1, in_time=False)
    seconds = row.seconds or mean_seconds(one.seconds for one in state.rows.recent(PACE_ROUNDS))
    return replace(
        state,
        peers=peers,
        rows=state.rows.append(row),
        contributors=state.contributors.add_round(event.round, seconds, event.given, event.drawn),
        trend=state.trend.add_loss(row.loss),
    )


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
    if row is None:
        return state
    rows = state.rows.replace_row(replace(row, validation_loss=event.loss, validation_by_source=event.by_source))
    return replace(state, rows=rows, trend=state.trend.add_validation(event.round, event.loss))


def _apply_scored(state: RunState, event: ScoresMeasured) -> RunState:
    row = state.rows.find(event.round)
    return state if row is None else replace(state, rows=state.rows.replace_row(replace(row, reward=event.reward)))


def _apply_forked(state: RunState, event: ChainForked) -> RunState:
    timelines = tuple(timed for timed in state.timelines if timed.round < event.round)
    rows, contributors = state.rows.truncate_from(event.round), state.contributors.truncate_from(event.round)
    evaluations = tuple(one for one in state.evaluations if one.round is None or one.round <= event.round)
    return replace(
        state,
        rows=rows,
        timelines=timelines,
        contributors=contributors,
        trend=trend_of(rows),
        evaluations=evaluations,
    )


def timings_of_round(state: RunState, round_number: int | None) -> tuple[int | None, tuple[PeerTiming, ...]]:
    """Return the number and the timeline of a round; `None` means the newest known one."""
    found = [timed for timed in state.timelines if round_number is None or timed.round == round_number]
    return (found[-1].round, found[-1].lanes) if found else (round_number, ())

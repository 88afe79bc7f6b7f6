"""Observes the swarm through a node and records the changes as events, at most twice a second.

Membership comes from the peer directory, rounds from the peers' chains, times and bytes from the peers' own records.
The watcher only reads, so a fault in it never affects training.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from node.daemon.receipts.commit_log import CommitLog, commit_file_header
from node.daemon.stages.stage_peers import served_stage
from node.daemon.stored_states.model_archive import ModelArchive, model_values
from node.dashboard.chain_follower import MAX_SHOWN_LOSS, ChainFollower, find_diverged, shown_manifest
from node.dashboard.event_log import EventLog
from node.dashboard.events import (
    ChainForked,
    PeerAppeared,
    PeerDeparted,
    PeerDiverged,
    PeerReport,
    PeersUpdated,
    Reach,
    RoundTimed,
    RunAbout,
    RunFacts,
    RunSteered,
    ScoresMeasured,
    SwarmFound,
    SwarmLost,
    ValidationMeasured,
)
from node.dashboard.json_views import peer_values, summary
from node.dashboard.observer_node import NodeHandle
from node.dashboard.round_timeline import RoundTimeline
from node.dashboard.steering import (
    AdoptionRecord,
    build_reports,
    describe_news,
    is_news,
    manifest_at_head,
)
from node.from_manifest import build_method, topology_class
from node.model import shape_table
from node.monitoring.stage_table import MICROBATCH_FIELDS
from protocol.consensus.chain import ChainLog
from protocol.identity import PeerId
from protocol.manifest.run import Manifest
from protocol.manifest.sections import MAX_STAGES, DataSection, SourceSection
from protocol.membership import peer_table
from protocol.membership.record_fields import losses_by_source, record_of_stage
from protocol.murmur_pb2 import PeerRecord
from protocol.pipeline.stage import stage_of
from protocol.tasks import run_until_one_ends
from protocol.transport.nat import is_relay_only, relays_of
from protocol.transport.rate_limit import TokenBuckets

logger = logging.getLogger(__name__)
TICK_SECONDS = 0.5
RATE_WINDOW_SECONDS = 2.0  # over which a peer's send rate is measured
MAX_KEPT_DIVERGED = 256
MAX_KEPT_PARTING = 64
MAX_TOKENS_PER_SECOND = 1e15  # sums over the peers' claims must stay finite
MAX_SHOWN_PEERS = 1024  # a later peer is shown when one of these leaves
SHARED_BUCKET = ""  # all unknown peers share one token bucket: keys are free, and the event log is never truncated
NEWS_BURST = 1024  # unknown peers, each with a few lines in the event log
NEWS_PER_SECOND = 0.1  # after the burst; limits the growth of the event log to 10 MB a day


class SwarmWatcher:
    """Compares the node's view of the swarm with the last one and records the difference.

    `commit_log` keeps the proofs of the rounds, and is written before `event_log` names them. `model` is the archive
    of the host's model, if it has one.
    """

    def __init__(
        self, node: NodeHandle, event_log: EventLog, commit_log: CommitLog, model: ModelArchive | None = None
    ) -> None:
        self._node = node
        self._event_log = event_log
        self._commit_log = commit_log
        self._model = model
        shown = shown_manifest(node.manifest)
        own = {node.peer_id: node.own_chain} if node.own_chain else {}
        limits = commit_file_header(shown).limits()
        self._chain_follower = ChainFollower(shown.run_id, limits, node.channel, own, shown.admission)
        self._stage = stage_of(shown)  # of a pipeline, the one whose chain is followed
        self._has_one_state = topology_class(build_method(node.manifest)).has_shared_state
        self._known: dict[PeerId, PeerRecord] = {}
        self._leave_reasons: dict[PeerId, str] = {}
        self._parting_records: dict[PeerId, PeerRecord] = {}  # the last ones of the trainers that left last
        self._timeline = RoundTimeline()
        self._byte_rates: dict[PeerId, ByteRate] = {}
        self._receive_rates: dict[PeerId, ByteRate] = {}
        self._diverged: deque[tuple[PeerId, int]] = deque(maxlen=MAX_KEPT_DIVERGED)
        self._adoptions = AdoptionRecord()
        self._newest_validation = 0
        self._scored_round = -1
        self._news_bucket = TokenBuckets(NEWS_BURST, NEWS_PER_SECOND)
        self._nobody_seen_since: float | None = None
        node.directory.subscribe(self)

    async def run(self) -> None:
        """Watch until cancelled. Raises StorageError if the event log cannot be written."""
        await run_until_one_ends(self._poll_forever(), self._follow_chain_forever())

    async def _poll_forever(self) -> None:
        while True:
            self.poll(time.time())
            await asyncio.sleep(TICK_SECONDS)

    async def _follow_chain_forever(self) -> None:
        while True:
            await self._follow_chain()
            await asyncio.sleep(TICK_SECONDS)

    async def _follow_chain(self) -> None:
        now = time.time()
        known = self._commit_log.head
        target = self._chain_follower.find_trusted_head(known, self._chain_trainers(now), now)
        if target is None:
            return
        steps = await self._chain_follower.fetch_steps(known, *target, now)
        if not steps:
            return
        self._commit_log.extend(steps[0].before, ChainLog(steps[0].electorate, tuple(step.entry for step in steps)))
        self._adoptions.record([step.commit for step in steps])
        for event in self._chain_follower.build_events(self._event_log.state, steps, now):
            self._event_log.record(event)
            if isinstance(event, ChainForked):  # the other chain's rounds of these numbers are measured again
                self._newest_validation = min(self._newest_validation, event.round)
                self._scored_round = min(self._scored_round, event.round - 1)
                self._parting_records.clear()

    def poll(self, now: float) -> None:
        """Record the changes since the last poll."""
        live = self._live(now)
        for peer in [peer for peer in self._known if peer not in live]:
            self._on_gone(peer, now)
        self._leave_reasons.clear()  # of peers that came and left between two polls
        moved = [self._on_record(peer, record, now) for peer, record in live.items() if self._is_news(peer, record)]
        self._known = live
        if moved:
            self._event_log.record(PeersUpdated(at=now, peers=tuple(moved)))
        self._record_rounds(now)
        self._record_steering(now)
        self._record_visibility(now)
        self._broadcast_summary(moved, now)

    @property
    def _known_round(self) -> int:
        last = self._event_log.state.rows.last
        return last.round if last else -1

    def _live(self, now: float) -> dict[PeerId, PeerRecord]:
        me = self._node.peer_id
        live = self._node.admitted.records()
        shown = [peer for peer in live if peer != me or self._node.is_trainer]
        known = self._known
        shown.sort(key=lambda peer: peer not in known)
        room = sum(peer in known for peer in shown) + int(self._news_bucket.tokens_left(SHARED_BUCKET, now))
        return {peer: live[peer] for peer in shown[: min(MAX_SHOWN_PEERS, room)]}

    def _trainers(self, now: float) -> dict[PeerId, PeerRecord]:
        return {peer: record for peer, record in self._live(now).items() if record.role == "trainer"}

    def _chain_trainers(self, now: float) -> dict[PeerId, PeerRecord]:
        """Return the trainers that make the rounds of the chain; of a pipeline, as peers of its last stage alone."""
        if self._stage is None:
            return self._trainers(now)
        seen = {peer: record_of_stage(record, self._stage) for peer, record in self._live(now).items()}
        return {peer: record for peer, record in seen.items() if record is not None}

    def _is_news(self, peer: PeerId, record: PeerRecord) -> bool:
        known = self._known.get(peer)
        return known is None or known.sequence != record.sequence

    def _on_record(self, peer: PeerId, record: PeerRecord, now: float) -> PeerReport:
        sending = self._byte_rates.setdefault(peer, ByteRate(now, record.bytes_sent))
        receiving = self._receive_rates.setdefault(peer, ByteRate(now, record.bytes_received))
        rates = sending.update(record.bytes_sent, now), receiving.update(record.bytes_received, now)
        report = build_peer_report(peer, record, rates, now)
        if peer not in self._known:
            self._news_bucket.try_take(SHARED_BUCKET, now)
            self._event_log.record(PeerAppeared(at=now, now=report))
        if record.role == "trainer" and self._stage is None:
            self._timeline.record(peer, record, now, self._known_round)
        return report

    def _on_gone(self, peer: PeerId, now: float) -> None:
        self._event_log.record(PeerDeparted(at=now, peer=peer, reason=self._leave_reasons.pop(peer, "expired")))
        self._timeline.forget(peer)
        self._byte_rates.pop(peer, None)
        self._receive_rates.pop(peer, None)

    def _record_rounds(self, now: float) -> None:
        known = self._known_round
        for round_number, lanes in self._timeline.pop_finished(now, known):
            self._event_log.record(RoundTimed(at=now, round=round_number, lanes=lanes))
        trainers = self._trainers(now)
        self._record_validation({**self._parting_records, **trainers}, now)
        self._record_scores(trainers, now)
        for diverged in find_diverged(trainers) if self._has_one_state else ():
            if diverged not in self._diverged and self._news_bucket.try_take(SHARED_BUCKET, now):
                self._diverged.append(diverged)
                self._event_log.record(PeerDiverged(at=now, peer=diverged[0], round=_clamp_count(diverged[1])))

    def _record_validation(self, records: Mapping[PeerId, PeerRecord], now: float) -> None:
        """Record the newest validation loss of a known round; that of the last round may come with a goodbye."""
        for peer, record in records.items():
            if self._newest_validation < record.validation_round <= self._known_round + 1:
                self._newest_validation = record.validation_round
                loss = min(record.validation_loss, MAX_SHOWN_LOSS)
                names = [source.name for source in self._node.manifest.data.sources]
                found = losses_by_source(record.validation_by_source, names)
                by_source = {name: min(each, MAX_SHOWN_LOSS) for name, each in found.items()}
                self._event_log.record(
                    ValidationMeasured(at=now, peer=peer, round=record.validation_round, loss=loss, by_source=by_source)
                )

    def _record_scores(self, trainers: Mapping[PeerId, PeerRecord], now: float) -> None:
        """Record once for each round of scores the mean score of the answers that its trainers learned from last."""
        rl = self._node.manifest.rl
        if rl is not None and not rl.has_begun(self._known_round):
            return  # a round of text, after which the first scores have come
        rewards = [record.reward for record in trainers.values() if record.HasField("reward")]
        if rewards and self._known_round > self._scored_round:
            self._scored_round = self._known_round
            mean = min(1.0, max(0.0, sum(rewards) / len(rewards)))
            self._event_log.record(ScoresMeasured(at=now, round=self._known_round, reward=mean))

    def _record_steering(self, now: float) -> None:
        """Record new revisions of the organiser, and those that have begun to hold."""
        log, state = self._node.revisions, self._event_log.state
        revisions = log.list_to(log.newest(self._adoptions.newest)) or ()
        if not revisions or state.facts is None:
            return
        next_round = self._known_round + 1
        reports = build_reports(revisions, self._adoptions, state.steered)
        revised = manifest_at_head(self._node.manifest, revisions, reports, next_round)
        facts = run_facts(self._node.manifest, state.facts.organiser, revised.manifest)
        news = describe_news(revisions, reports, state.steered)
        steered = RunSteered(at=now, facts=facts, revisions=reports, is_paused=revised.is_paused, news=news)
        if is_news(facts, steered, state.facts, state.steered):
            self._event_log.record(steered)

    def _record_visibility(self, now: float) -> None:
        """Record that the swarm is lost after a record's lifetime without a trainer, or found again.

        Only the host's own link may be down.
        """
        state = self._event_log.state
        if self._trainers(now):
            self._nobody_seen_since = None
            if state.lost_since is not None:
                self._event_log.record(SwarmFound(at=now))
            return
        self._nobody_seen_since = self._nobody_seen_since or now
        if state.have_all_left or state.is_over:
            return
        silence = self._node.manifest.membership.expiry
        if state.lost_since is None and state.has_begun and now - self._nobody_seen_since > silence:
            self._event_log.record(SwarmLost(at=now))

    def _broadcast_summary(self, updated: list[PeerReport], now: float) -> None:
        if not self._event_log.subscriber_count:
            return
        state = self._event_log.state
        names = {report.peer for report in updated}
        peers = [peer_values(state, peer) for name, peer in state.peers.items() if name in names]
        self._event_log.broadcast("now", {**summary(state, now), **model_values(self._model), "moved": peers})

    def on_membership_changed(self, events: Sequence[peer_table.MembershipEvent]) -> None:
        """Remember why peers left, for the next poll."""
        for event in events:
            self._observe(event)

    def _observe(self, event: peer_table.MembershipEvent) -> None:
        if isinstance(event, peer_table.PeerLeft):
            self._leave_reasons[event.peer] = event.reason
            if event.record is not None and event.record.role == "trainer":
                self._parting_records[event.peer] = event.record
                if len(self._parting_records) > MAX_KEPT_PARTING:
                    del self._parting_records[next(iter(self._parting_records))]
        elif isinstance(event, peer_table.PeerJoined):
            self._leave_reasons.pop(event.peer, None)


class ByteRate:
    """Measures bytes per second over RATE_WINDOW_SECONDS from a growing total."""

    def __init__(self, started_at: float, count: int) -> None:
        self._window_start = started_at
        self._count = count
        self._value = 0.0

    def update(self, count: int, now: float) -> float:
        """Take in the newest total; returns the rate."""
        if count < self._count:  # the peer restarted
            self._window_start = now
            self._count = count
            self._value = 0.0
        elif now - self._window_start >= RATE_WINDOW_SECONDS:
            self._value = (count - self._count) / (now - self._window_start)
            self._window_start = now
            self._count = count
        return round(self._value, 1)


def _role_of(record: PeerRecord) -> Literal["trainer", "observer", "rollout"]:
    match record.role:
        case "trainer" | "rollout" as role:
            return role
        case _:
            return "observer"


def build_peer_report(peer: PeerId, record: PeerRecord, rates: tuple[float, float], now: float) -> PeerReport:
    """Build the report of a peer from its record, with all claims clamped to sane ranges.

    `rates` are the bytes per second that it sends and receives.
    """
    served = served_stage(record, MAX_STAGES)
    return PeerReport(
        peer=peer,
        role=_role_of(record),
        name=record.name,
        device=record.device,
        version=record.version,
        reach=_reach(record),
        carriers=relays_of(record.addresses),
        carried=_clamp_count(record.bytes_carried),
        round=_clamp_count(record.round),
        step=_clamp_count(record.step),
        tokens=_clamp_count(record.tokens),
        loss=max(-MAX_SHOWN_LOSS, min(record.loss, MAX_SHOWN_LOSS)) or None,
        tokens_per_second=min(record.tokens_per_second, MAX_TOKENS_PER_SECOND),
        bytes_sent=_clamp_count(record.bytes_sent),
        sending=rates[0],
        receiving=rates[1],
        learning_rate=record.learning_rate or None,
        gradient_norm=min(record.gradient_norm, MAX_SHOWN_LOSS) or None,
        device_use=record.device_use if record.HasField("device_use") else None,
        device_memory=_clamp_count(record.device_memory) or None,
        device_memory_total=_clamp_count(record.device_memory_total) or None,
        reward=record.reward if record.HasField("reward") else None,
        rollouts=_clamp_count(record.rollouts),
        resting=record.resting,
        stage=served.stage if served else None,
        stage_rate=served.rate if served else 0.0,
        microbatches=_microbatches(record) if served else {},
        seen=now,
    )


def _microbatches(record: PeerRecord) -> dict[str, int]:
    return {word: _clamp_count(getattr(record, field)) for word, field in MICROBATCH_FIELDS.items()}


def _reach(record: PeerRecord) -> Reach:
    if not record.addresses:
        return "unknown"
    return "relay" if is_relay_only(record.addresses) else "direct"


def _clamp_count(count: int) -> int:
    """Clamp a peer's 64-bit claim to the 53 bits that JSON represents exactly."""
    return min(count, 2**53)


def run_facts(base: Manifest, organiser: PeerId, revised: Manifest | None = None) -> RunFacts:
    """Return the facts of a run, whose manifest at its beginning is `base`, with the organiser's revisions."""
    manifest = revised or base
    return RunFacts(
        run=manifest.run.name,
        run_id=base.run_id,
        recipe=manifest.method.recipe,
        parameters=shape_table(manifest.model).numel,
        batch_tokens=manifest.train.batch_tokens,
        min_peers=manifest.run.min_peers,
        stages=manifest.pipeline.stages,
        target_rounds=manifest.target.rounds,
        target_tokens=manifest.target.tokens,
        organiser=organiser,
        expiry=manifest.membership.expiry,
        about=RunAbout(**manifest.about.model_dump(), source=describe_sources(manifest.data)),
    )


def describe_sources(data: DataSection) -> str:
    """Return the sources of the text with their shares at the beginning of the run."""
    if data.source == "own":
        return data.source
    if len(data.mixture) == 1:
        return _describe_source(data.mixture[0])
    total = sum(data.first_weights)
    shares = ((source, f"{source.weight / total:.0%}") for source in data.mixture)
    return ", ".join(f"{source.name} {share} ({_describe_source(source)})" for source, share in shares)


def _describe_source(source: SourceSection) -> str:
    """Return the data set's name; of a path on some machine, only the end."""
    name = Path(source.path).name if source.source != "hf" else source.path
    return f"{source.source}: {name}" if name else source.source

"""Audit other peers: repeat the contributions that are drawn for us, and exchange findings with the other auditors.

One audit computes at a time, in a separate process at a low priority, so that neither a round nor the trainer waits for
it. If more contributions are drawn than this machine can repeat, the newest are skipped.
"""

import asyncio
import logging
import tempfile
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from node.daemon.audits.repeater import JobResult, RepeatJob
from node.daemon.audits.screening import AuditResult, RecordCheck, find_broken_link, next_link
from node.daemon.audits.work_log import WorkLog, max_state_bytes
from node.daemon.node_network import NodeNetwork
from node.daemon.peers.replica_peers import ReplicaPeers
from node.daemon.state.replica_state import ReplicaState
from node.loop.peers.peer_conduct import PeerConduct
from node.processes.workers import BackgroundTasks, FaultSink, run_module
from node.step_settings import StepSettings, step_settings
from protocol.audit_tracker import AuditTracker, Consequence, PeerCleared, PeerStruck, RepeatWork
from protocol.audits import (
    Audit,
    AuditKey,
    Conditions,
    Finding,
    SignedFinding,
    Verdict,
    WorkRecord,
    open_finding,
    sign_finding,
)
from protocol.blobs.blob import Blob
from protocol.conduct import PeerConvicted
from protocol.consensus.chain import Chain
from protocol.consensus.messages.contributions import Contribution
from protocol.consensus.messages.signed import Digest
from protocol.errors import MissingFileError, PeerFault, StorageError, UnreachableError
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed

logger = logging.getLogger(__name__)

KEPT_ANCHORS = 4
MAX_WAITING = 2
MAX_DISPUTES = 16
MIN_FETCH_SECONDS = 30.0
MIN_BYTES_PER_SECOND = 100_000
REPEAT_SECONDS = 1800.0
TRAINED_ROUNDS = 16  # the peer's previous contribution is at most this many rounds older
UNSERVED = (PeerFault, UnreachableError, MissingFileError)


@dataclass
class _Evidence:
    """The anchors of the round of an audit, and the blobs that it has fetched.

    An auditor that found a difference keeps the blobs for the other auditors, because a liar stops serving them.
    """

    anchors: Mapping[int, Tensor]
    blobs: set[Digest] = field(default_factory=set)


def judge(result: JobResult, contribution: Contribution, record: WorkRecord) -> AuditResult:
    """Return the outcome of repeated work: every bit agrees, or on another kind of device nearly all."""
    repetition = result.repetition
    if repetition is None:
        return AuditResult("not auditable" if result.obstacle else "different", result.obstacle or result.malformed)
    if result.gap is not None:
        falsehood = repetition.find_false(contribution, result.gap)
        return AuditResult("different" if falsehood else "similar", falsehood)
    difference = repetition.find_difference(contribution, record)
    return AuditResult("different" if difference else "equal", difference)


class Auditor:
    """Performs the audits of one replica.

    `counts` counts the audits by verdict, `refusals` the offences of peers.
    """

    def __init__(
        self, node: NodeNetwork, state: ReplicaState, peers: ReplicaPeers, conduct: PeerConduct, faults: FaultSink
    ) -> None:
        self._node = node
        self._state = state
        self._peers = peers
        self._peer_conduct = conduct
        self._conduct = conduct.conduct
        self._tracker = AuditTracker(node.peer_id)
        self.work_log = WorkLog(state.store.put, state.shared_memory)
        self._tasks = BackgroundTasks(faults)
        self._one_at_a_time = asyncio.Semaphore(1)
        self._evidence: dict[AuditKey, _Evidence] = {}
        self._running: list[_Evidence] = []
        self._anchors: deque[tuple[int, Tensor]] = deque(maxlen=KEPT_ANCHORS)
        self.conditions: Conditions | None = None  # of our own trainer
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()

    @property
    def held_digests(self) -> Collection[Digest]:
        """Return the blobs that our audits need, and those that an audit of our work needs."""
        fetched = (digest for evidence in (*self._evidence.values(), *self._running) for digest in evidence.blobs)
        return [*fetched, *self.work_log.kept_digests]

    def remember_anchor(self, round_number: int, shared: Sequence[Tensor]) -> None:
        """Keep the anchor of a round for the audits of its contributions."""
        if round_number not in dict(self._anchors):
            self._anchors.append((round_number, torch.cat(list(shared))))

    def on_commit(self, chain: Chain) -> None:
        """Draw the audits that the newest commit decides, and start ours."""
        consequences = self._tracker.open_round(chain, self._state.manifest.audits.share)
        ours = self._tracker.our_audits
        anchors = {number: anchor for number, anchor in self._anchors if number < chain.round}
        self._evidence = {key: self._evidence.get(key) or _Evidence(anchors) for key in ours}
        self._follow(consequences)

    def receive(self, signed: Signed) -> None:
        """Handle the finding of another auditor. Raises PeerFault."""
        self._follow(self._tracker.learn(open_finding(signed, self._state.run_id)))

    def stop(self) -> None:
        self._tasks.cancel_all()

    def _follow(self, consequences: list[Consequence]) -> None:
        for consequence in consequences:
            match consequence:
                case RepeatWork():
                    self._begin(consequence)
                case PeerConvicted():
                    self.refusals[consequence.offence] += 1
                    self._peer_conduct.convict(consequence)
                    logger.warning("%s is excluded: %s", consequence.peer, consequence.describe())
                case PeerStruck(peer, reason):
                    self.refusals[reason] += 1
                    self._conduct.strike(peer, self._state.replicated.chain.round - 1, reason)
                    logger.info("a strike against %s: %s", peer, reason)
                case PeerCleared(peer):
                    self._conduct.clear(peer)
                    logger.info("a larger panel takes the strike against %s back", peer)

    def _begin(self, order: RepeatWork) -> None:
        if order.audit.contribution.sender in self._conduct.excluded:
            return
        is_busy = len(self._tasks) >= (MAX_DISPUTES if order.is_disputed else MAX_WAITING)
        if is_busy or order.audit.key not in self._evidence:
            self.counts["skipped"] += 1
        else:
            self._tasks.spawn(self._audit(order, self._evidence[order.audit.key]))

    async def _audit(self, order: RepeatWork, evidence: _Evidence) -> None:
        audit, entry = order.audit, order.audit.contribution
        self._running.append(evidence)
        try:
            outcome = await self._compare(order, evidence)
        except (OSError, MissingFileError, StorageError, TimeoutError) as error:
            outcome = AuditResult("skipped", str(error))
        finally:
            self._running.remove(evidence)
        reason = f" ({outcome.reason})" if outcome.reason else ""
        logger.debug("audited %s in round %d: %s%s", entry.sender, entry.body.round, outcome.verdict, reason)
        self.counts[outcome.verdict] += 1
        if outcome.verdict != "different":
            evidence.blobs.clear()
        if outcome.verdict != "skipped":
            self._report(audit, outcome.verdict)

    def _report(self, audit: Audit, verdict: Verdict) -> None:
        entry = audit.contribution
        self._follow(self._tracker.note_verdict(audit, verdict))
        if self._tracker.is_published(audit, verdict):
            finding = Finding(entry.body.round, audit.chain, entry.sender, entry.digest, verdict)
            signed = sign_finding(self._node.identity, self._state.run_id, finding)
            self._peers.outbox.send(self._peers.swarm_view.other_trainers(), signed.signed)
            self._learn_own(signed)

    def _learn_own(self, finding: SignedFinding) -> None:
        try:
            self._follow(self._tracker.learn(finding))
        except PeerFault as fault:
            logger.debug("the round of our finding is over: %s", fault)

    async def _compare(self, order: RepeatWork, evidence: _Evidence) -> AuditResult:
        """Fetch the records at once, because the peer keeps them for a few rounds only, then repeat the work."""
        contribution, own = order.audit.contribution.body, self.conditions
        if own is None:
            return AuditResult("skipped", "our trainer has not started")
        if contribution.work is None:
            return AuditResult("not auditable", "it names no work record")
        holders = [order.audit.contribution.sender, *(order.audit.auditors if order.is_disputed else ())]
        try:
            records = [await self._read_record(contribution.work, holders, evidence)]
            screening = RecordCheck(self._state.planner, own, max_state_bytes(self._state.shared_memory.layout))
            if outcome := screening.check(records[0], contribution, evidence.anchors):
                return outcome
            while link := next_link(records, order.last_work):
                records.append(await self._read_record(link, holders, evidence))
            if obstacle := find_broken_link(records, order.last_work):
                return AuditResult("not auditable", obstacle)
            before = records[0].before
            if before is not None:
                await self._fetch(before.blob, holders, evidence)
        except UNSERVED as error:
            return AuditResult("not served", str(error))
        claimed = contribution.parts if screening.is_other_kind(records[0]) else ()
        try:
            for blob in claimed:
                await self._fetch(blob, holders, evidence)
        except UNSERVED as error:  # peers keep contributions for a few rounds only
            return AuditResult("skipped", str(error))
        sender = order.audit.contribution.sender
        async with self._one_at_a_time:
            outcome = judge(await self._repeat(sender, records[0], evidence.anchors, claimed), contribution, records[0])
            if outcome.verdict != "different":
                return outcome
            # Our key is at stake, so a bit that flipped here must not speak against the peer.
            again = judge(await self._repeat(sender, records[0], evidence.anchors, claimed), contribution, records[0])
        return again if again.verdict == "different" else AuditResult("skipped", "two repetitions here differ")

    def _settings_at(self, number: int) -> StepSettings | None:
        """Return the settings of a round's inner steps; `None` for an old round."""
        steering = self._state.steering
        tokens = steering.tokens_at(number)
        return None if tokens is None else step_settings(steering.manifest_at(number), number, tokens)

    async def _read_record(self, blob: Blob, holders: Sequence[PeerId], evidence: _Evidence) -> WorkRecord:
        await self._fetch(blob, holders, evidence)
        return WorkRecord.from_bytes(await asyncio.to_thread(self._state.store.read, blob.digest))

    async def _fetch(self, blob: Blob, holders: Sequence[PeerId], evidence: _Evidence) -> None:
        evidence.blobs.add(blob.digest)
        seconds = MIN_FETCH_SECONDS + blob.size / MIN_BYTES_PER_SECOND
        await self._peers.downloads.download_from_holders(blob, seconds, holders)

    async def _repeat(
        self, peer: PeerId, record: WorkRecord, anchors: Mapping[int, Tensor], claimed: Sequence[Blob]
    ) -> JobResult:
        """Repeat work in a separate process. Raises OSError, MissingFileError or TimeoutError if that fails."""
        steering = self._state.steering
        rounds = {*range(max(0, record.round - TRAINED_ROUNDS), record.round + 1), *record.anchor_rounds}
        job = RepeatJob(
            manifest=steering.base.to_toml(),
            base=str(self._node.options.base),
            device=self._node.options.device,
            peer=peer,
            record=record,
            settings={number: found for number in rounds if (found := self._settings_at(number)) is not None},
            claimed_parts=len(claimed),
        )
        before, store = record.before, self._state.store
        state = None if before is None else await asyncio.to_thread(store.read, before.blob.digest)
        with tempfile.TemporaryDirectory(prefix="murmur-audit-") as name:
            folder = Path(name)
            work = [await asyncio.to_thread(store.read, blob.digest) for blob in claimed]
            await asyncio.to_thread(job.write, folder, state, anchors, work)
            child = await run_module("node.daemon.audits", [name], REPEAT_SECONDS)
        if child.exit_code:
            raise OSError(f"the audit process ended with {child.exit_code}: {child.last_error}")
        return JobResult.model_validate_json(child.output)

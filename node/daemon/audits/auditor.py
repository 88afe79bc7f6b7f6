"""Audit other peers: repeat the contributions that are drawn for us, and exchange findings with the other auditors.

One repetition runs at a time, in a process of its own at a low priority, so that neither a round nor the trainer
waits for it. If more are drawn than this machine can repeat, the newest are skipped.
"""

import asyncio
import logging
import tempfile
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from node.daemon.audits.inner_state import max_state_bytes
from node.daemon.audits.job import JobResult, RepeatJob
from node.daemon.audits.screening import Judgement, Screening, find_broken_link, next_link
from node.daemon.audits.work_keeper import WorkKeeper
from node.loop.steering import Steering
from node.options import Device
from node.processes.workers import BackgroundTasks, FaultSink, run_module
from node.step_settings import StepSettings, step_settings
from node.trainer.ipc.shared_memory import SharedLayout
from optim.round_plan import RoundPlanner
from protocol.audits import (
    Audit,
    AuditKey,
    AuditTracker,
    Conditions,
    Consequence,
    Finding,
    PeerLied,
    PeerStruck,
    RepeatWork,
    SignedFinding,
    Verdict,
    WorkRecord,
    open_finding,
    sign_finding,
)
from protocol.blobs.blob import Blob
from protocol.blobs.store import BlobStore
from protocol.conduct import Conduct
from protocol.consensus.history.chain import Chain
from protocol.consensus.messages.signed import Digest
from protocol.errors import MissingFileError, PeerFault, StorageError, UnreachableError
from protocol.identity import Identity, PeerId
from protocol.murmur_pb2 import Signed

logger = logging.getLogger(__name__)

KEPT_ANCHORS = 3
MAX_WAITING = 2
MAX_DISPUTES = 16
MIN_FETCH_SECONDS = 30.0
MIN_BYTES_PER_SECOND = 100_000
REPEAT_SECONDS = 1800.0
TRAINED_ROUNDS = 16  # before that of a contribution, in which the last contribution of its peer may have been made
UNSERVED = (PeerFault, UnreachableError, MissingFileError)


class BlobFetcher(Protocol):
    async def download_from_holders(self, blob: Blob, deadline: float, holders: Sequence[PeerId]) -> None: ...


class FindingSender(Protocol):
    def send(self, peers: Iterable[PeerId], message: Signed) -> None: ...


class TrainerView(Protocol):
    def other_trainers(self) -> Sequence[PeerId]: ...


@dataclass(frozen=True, kw_only=True)
class AuditTools:
    """The parts of a replica that an audit needs; `base` is the folder of the text."""

    identity: Identity
    planner: RoundPlanner
    steering: Steering
    store: BlobStore
    keeper: WorkKeeper
    fetcher: BlobFetcher
    outbox: FindingSender
    swarm: TrainerView
    conduct: Conduct
    base: Path
    device: Device


@dataclass
class _Held:
    """The records of one audit: the anchors of its round, and the blobs that it has fetched.

    An auditor that found a difference keeps them for the other auditors, because a liar serves them no longer.
    """

    anchors: Mapping[int, Tensor]
    blobs: set[Digest] = field(default_factory=set)


class Auditor:
    """Carries out the audits of one replica.

    `counts` has the audits by verdict, `refusals` what peers were found to have done.
    """

    def __init__(self, tools: AuditTools, faults: FaultSink) -> None:
        self._tools = tools
        self._share = tools.steering.base.audits.share
        self._run_id = tools.steering.base.run_id
        self._layout = SharedLayout.of(tools.planner)
        self._tracker = AuditTracker(tools.identity.peer_id)
        self._tasks = BackgroundTasks(faults)
        self._one_at_a_time = asyncio.Semaphore(1)
        self._held: dict[AuditKey, _Held] = {}
        self._running: list[_Held] = []
        self._anchors: deque[tuple[int, Tensor]] = deque(maxlen=KEPT_ANCHORS)
        self.conditions: Conditions | None = None  # of our own trainer
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()

    @property
    def work_keeper(self) -> WorkKeeper:
        return self._tools.keeper

    @property
    def held_digests(self) -> Collection[Digest]:
        """Return the blobs that an audit needs, ours or one of our work."""
        fetched = (digest for held in (*self._held.values(), *self._running) for digest in held.blobs)
        return [*fetched, *self._tools.keeper.kept_digests]

    def remember_anchor(self, round_number: int, shared: Sequence[Tensor]) -> None:
        """Keep the anchor of a round for the audits of its contributions."""
        if round_number not in dict(self._anchors):
            self._anchors.append((round_number, torch.cat(list(shared))))

    def on_commit(self, chain: Chain) -> None:
        """Draw the audits of the newest commit, and repeat what is ours."""
        consequences = self._tracker.open_round(chain, self._share)
        ours = self._tracker.our_audits
        anchors = {number: anchor for number, anchor in self._anchors if number < chain.round}
        self._held = {key: self._held.get(key) or _Held(anchors) for key in ours}
        self._follow(consequences)

    def receive(self, signed: Signed) -> None:
        """Take the finding of another auditor. Raises PeerFault."""
        self._follow(self._tracker.learn(open_finding(signed, self._run_id)))

    def stop(self) -> None:
        self._tasks.cancel_all()

    def _follow(self, consequences: list[Consequence]) -> None:
        for consequence in consequences:
            match consequence:
                case RepeatWork():
                    self._begin(consequence)
                case PeerLied(peer, round_number):
                    self.refusals["audit: lied"] += 1
                    self._tools.conduct.convict(peer)
                    logger.warning("auditors agree that %s lied about its work in round %d", peer, round_number)
                case PeerStruck(peer, reason):
                    self.refusals[reason] += 1
                    self._tools.conduct.strike(peer, self._tracker.round, reason)
                    logger.info("a strike against %s: %s", peer, reason)

    def _begin(self, order: RepeatWork) -> None:
        if order.audit.contribution.sender in self._tools.conduct.excluded:
            return
        is_busy = len(self._tasks) >= (MAX_DISPUTES if order.is_disputed else MAX_WAITING)
        if is_busy or order.audit.key not in self._held:
            self.counts["skipped"] += 1
        else:
            self._tasks.spawn(self._audit(order, self._held[order.audit.key]))

    async def _audit(self, order: RepeatWork, held: "_Held") -> None:
        audit, entry = order.audit, order.audit.contribution
        self._running.append(held)
        try:
            judgement = await self._judge(order, held)
        except (OSError, MissingFileError, StorageError, TimeoutError) as error:
            judgement = Judgement("skipped", str(error))
        finally:
            self._running.remove(held)
        reason = f" ({judgement.reason})" if judgement.reason else ""
        logger.debug("audited %s in round %d: %s%s", entry.sender, entry.body.round, judgement.verdict, reason)
        self.counts[judgement.verdict] += 1
        if judgement.verdict != "different":
            held.blobs.clear()
        if judgement.verdict != "skipped":
            self._report(audit, judgement.verdict)

    def _report(self, audit: Audit, verdict: Verdict) -> None:
        entry = audit.contribution
        self._follow(self._tracker.note_verdict(audit, verdict))
        if self._tracker.is_published(audit, verdict):
            finding = Finding(entry.body.round, audit.chain, entry.sender, entry.digest, verdict)
            signed = sign_finding(self._tools.identity, self._run_id, finding)
            self._tools.outbox.send(self._tools.swarm.other_trainers(), signed.signed)
            self._learn_own(signed)

    def _learn_own(self, finding: SignedFinding) -> None:
        try:
            self._follow(self._tracker.learn(finding))
        except PeerFault as fault:
            logger.debug("the round of our finding is over: %s", fault)

    async def _judge(self, order: RepeatWork, held: "_Held") -> Judgement:
        """Fetch what the repetition needs at once, because the peer keeps it for a few rounds, and then repeat."""
        contribution, own = order.audit.contribution.body, self.conditions
        if own is None:
            return Judgement("skipped", "our trainer has not started")
        if contribution.work is None:
            return Judgement("not auditable", "it names no work record")
        holders = [order.audit.contribution.sender, *(order.audit.auditors if order.is_disputed else ())]
        try:
            records = [await self._read_record(contribution.work, holders, held)]
            screening = Screening(self._tools.planner, own, max_state_bytes(self._layout))
            if judgement := screening.check(records[0], contribution, held.anchors):
                return judgement
            while link := next_link(records, order.last_work):
                records.append(await self._read_record(link, holders, held))
            if obstacle := find_broken_link(records, order.last_work):
                return Judgement("not auditable", obstacle)
            before = records[0].before
            if before is not None:
                await self._fetch(before.blob, holders, held)
        except UNSERVED as error:
            return Judgement("not served", str(error))
        async with self._one_at_a_time:
            result = await self._repeat(order.audit.contribution.sender, records[0], held.anchors)
        if result.repetition is None:
            return Judgement("not auditable" if result.obstacle else "different", result.obstacle or result.malformed)
        difference = result.repetition.find_difference(contribution, records[0])
        return Judgement("different" if difference else "equal", difference)

    def _settings_at(self, number: int) -> StepSettings | None:
        """Return the settings of the steps of a round; `None` for one of long ago."""
        steering = self._tools.steering
        tokens = steering.tokens_at(number)
        return None if tokens is None else step_settings(steering.manifest_at(number), number, tokens)

    async def _read_record(self, blob: Blob, holders: Sequence[PeerId], held: "_Held") -> WorkRecord:
        await self._fetch(blob, holders, held)
        return WorkRecord.from_bytes(await asyncio.to_thread(self._tools.store.read, blob.digest))

    async def _fetch(self, blob: Blob, holders: Sequence[PeerId], held: "_Held") -> None:
        held.blobs.add(blob.digest)
        seconds = MIN_FETCH_SECONDS + blob.size / MIN_BYTES_PER_SECOND
        await self._tools.fetcher.download_from_holders(blob, seconds, holders)

    async def _repeat(self, peer: PeerId, record: WorkRecord, anchors: Mapping[int, Tensor]) -> JobResult:
        """Repeat work in a process of its own. Raises OSError or TimeoutError if it does not end well."""
        steering = self._tools.steering
        rounds = {*range(max(0, record.round - TRAINED_ROUNDS), record.round + 1), *record.anchor_rounds}
        job = RepeatJob(
            manifest=steering.base.to_toml(),
            base=str(self._tools.base),
            device=self._tools.device,
            peer=peer,
            record=record,
            settings={number: found for number in rounds if (found := self._settings_at(number)) is not None},
        )
        before, store = record.before, self._tools.store
        state = None if before is None else await asyncio.to_thread(store.read, before.blob.digest)
        with tempfile.TemporaryDirectory(prefix="murmur-audit-") as name:
            folder = Path(name)
            await asyncio.to_thread(job.write, folder, state, anchors)
            child = await run_module("node.daemon.audits", [name], REPEAT_SECONDS)
        if child.exit_code:
            raise OSError(f"the audit process ended with {child.exit_code}: {child.last_error}")
        return JobResult.model_validate_json(child.output)

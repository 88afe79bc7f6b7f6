"""Audits among virtual peers: each has the tracker of a daemon, and repetitions are computed once for all of them."""

from collections import Counter, deque
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from node.daemon.audits.repeater import Repeater
from node.daemon.audits.screening import AuditResult, RecordCheck, find_broken_link, next_link
from node.daemon.audits.work_log import InnerState, WorkLog, max_state_bytes
from node.daemon.state.outer_state import OuterState
from node.data import Corpus
from node.simulation.virtual.trainer import VirtualTrainer
from node.step_settings import StepSettings, step_settings
from node.trainer.ipc.channel import ContributionHeader
from node.trainer.ipc.shared_memory import SharedLayout
from protocol import murmur_pb2 as wire
from protocol.audit_tracker import AuditTracker, Consequence, PeerStruck, RepeatWork
from protocol.audits import (
    FINDING_KIND,
    Audit,
    Conditions,
    Finding,
    SignedFinding,
    WorkRecord,
)
from protocol.blobs.blob import Blob
from protocol.conduct import PeerConvicted
from protocol.consensus.chain import Chain
from protocol.consensus.messages.signed import Digest
from protocol.errors import MalformedError, MissingFileError, StaleError
from protocol.identity import PeerId

if TYPE_CHECKING:
    from node.simulation.swarm import VirtualSwarm

KEPT_ANCHORS = 8


class SwarmAudits:
    """The shared records of the audits of one swarm: anchors by round, judgements, and their results."""

    def __init__(self, swarm: "VirtualSwarm", corpus: Corpus) -> None:
        self._swarm = swarm
        self._corpus = corpus
        self._anchors: deque[tuple[int, torch.Tensor]] = deque(maxlen=KEPT_ANCHORS)
        self._tokens: dict[int, int] = {}  # of the run, by round
        self._judgements: dict[tuple[Digest, PeerId], AuditResult] = {}
        self.conditions = Conditions(
            device="cpu simulated", text=corpus.fingerprint(swarm.config.manifest.model.context),
            microbatch=swarm.config.manifest.train.microbatch,
        )  # fmt: skip
        self.verdicts: Counter[str] = Counter()
        self.audited: Counter[PeerId] = Counter()
        self.caught: dict[PeerId, int] = {}  # by round
        self.struck: Counter[str] = Counter()
        self.remember_anchor(0, 0, swarm.compute.initial[0])

    @property
    def share(self) -> float:
        return self._swarm.config.manifest.audits.share

    @cached_property
    def _repeater(self) -> Repeater:
        config = self._swarm.config
        return Repeater(config.manifest, self._swarm.planner, self._corpus, self._settings_at, config.build_model)

    def _settings_at(self, number: int) -> StepSettings:
        return step_settings(self._swarm.manifest_with_target, number, self._tokens[number])

    @cached_property
    def _layout(self) -> SharedLayout:
        return SharedLayout.of(self._swarm.planner)

    def new_keeper(self, trainer: VirtualTrainer) -> WorkLog:
        return WorkLog(self._swarm.compute.put, trainer.shared_memory)

    def remember_anchor(self, round_number: int, tokens: int, state: OuterState) -> None:
        """Keep the anchor of a round and the tokens of the run, once."""
        self._tokens[round_number] = tokens
        if round_number not in dict(self._anchors):
            self._anchors.append((round_number, torch.cat(state.shared_vectors(self._swarm.method))))

    def judge(self, audit: Audit, last_work: Blob | None) -> AuditResult:
        """Repeat a contribution, once for all its auditors."""
        key = audit.chain, audit.contribution.sender
        if key not in self._judgements:
            self._judgements[key] = judgement = self._judge(audit, last_work)
            self.verdicts[judgement.verdict] += 1
            self.audited[audit.contribution.sender] += 1
        return self._judgements[key]

    def _judge(self, audit: Audit, last_work: Blob | None) -> AuditResult:
        contribution, anchors = audit.contribution.body, dict(self._anchors)
        screening = RecordCheck(self._swarm.planner, self.conditions, max_state_bytes(self._layout))
        try:
            if contribution.work is None:
                return AuditResult("not auditable", "it names no work record")
            records = [self._read_record(contribution.work)]
            if judgement := screening.check(records[0], contribution, anchors):
                return judgement
            while link := next_link(records, last_work):
                records.append(self._read_record(link))
            if obstacle := find_broken_link(records, last_work):
                return AuditResult("not auditable", obstacle)
            before = None if records[0].before is None else self._read_state(records[0].before.blob)
        except MissingFileError:
            return AuditResult("not served")
        try:
            repetition = self._repeater.repeat(audit.contribution.sender, records[0], before, anchors)
        except MalformedError as error:
            return AuditResult("different", str(error))
        difference = repetition.find_difference(contribution, records[0])
        return AuditResult("different" if difference else "equal", difference)

    def _read_record(self, blob: Blob) -> WorkRecord:
        return WorkRecord.from_bytes(self._swarm.compute.read(blob))

    def _read_state(self, blob: Blob) -> InnerState:
        return InnerState.from_bytes(bytearray(self._swarm.compute.read(blob)), self._layout)

    def publish(self, finding: SignedFinding) -> None:
        """Let every living peer learn a finding."""
        for peer in self._swarm.live_peers:
            if peer.audits is not None:
                peer.audits.learn(finding)


class PeerAudits:
    """The audits of one virtual peer."""

    def __init__(self, swarm_audits: SwarmAudits, peer_id: PeerId) -> None:
        self._shared = swarm_audits
        self._peer_id = peer_id
        self._tracker = AuditTracker(peer_id)
        self._keeper: tuple[VirtualTrainer, WorkLog] | None = None

    def record_work(self, trainer: VirtualTrainer, header: ContributionHeader) -> Blob:
        """Store the work record and the inner state of a new contribution."""
        if self._keeper is None or self._keeper[0] is not trainer:
            self._keeper = trainer, self._shared.new_keeper(trainer)
        trainer.state.save()
        return self._keeper[1].record(header.model_copy(update={"conditions": self._shared.conditions}))

    def on_new_head(self, chain: Chain, state: OuterState) -> None:
        """Draw the audits of the newest round, and repeat what is ours."""
        self._shared.remember_anchor(chain.round, chain.tokens, state)
        self._follow(self._tracker.open_round(chain, self._shared.share))

    def learn(self, finding: SignedFinding) -> None:
        with suppress(StaleError):
            self._follow(self._tracker.learn(finding))

    def _follow(self, consequences: list[Consequence]) -> None:
        for consequence in consequences:
            match consequence:
                case RepeatWork(audit, last_work):
                    self._repeat(audit, last_work)
                case PeerConvicted():
                    self._shared.caught.setdefault(consequence.peer, consequence.round)
                case PeerStruck(_, reason):
                    self._shared.struck[reason] += 1

    def _repeat(self, audit: Audit, last_work: Blob | None) -> None:
        peer = audit.contribution.sender
        judgement = self._shared.judge(audit, last_work)
        if judgement.verdict == "skipped":
            return
        self._follow(self._tracker.note_verdict(audit, judgement.verdict))
        if self._tracker.is_published(audit, judgement.verdict):
            body = audit.contribution.body
            finding = Finding(body.round, audit.chain, peer, audit.contribution.digest, judgement.verdict)
            signed = wire.Signed(kind=FINDING_KIND, peer=self._peer_id)
            self._shared.publish(SignedFinding(signed, finding, self._peer_id))

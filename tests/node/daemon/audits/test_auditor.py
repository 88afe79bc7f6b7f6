"""The auditor of a real replica: it repeats real work in a process of its own, and acts on findings."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from node.daemon.audits.auditor import Auditor
from node.daemon.audits.work_log import WorkLog, record_interrupted
from node.daemon.node import Node
from node.daemon.replica import Replica
from node.data import open_corpus
from node.loop.actions import SaveProofs
from node.loop.contributions import StoredContribution
from node.model import build_model
from node.options import NodeOptions
from node.processes.workers import ChildResult, run_module, start_workers
from node.run_dir import RunDir
from node.simulation.virtual.trainer import VirtualTrainer
from node.trainer.devices.device import device_class
from node.trainer.ipc.channel import ContributionHeader
from optim.exchange import ContributionEncoder
from protocol.audits import Conditions, Finding, Verdict, WorkRecord, sign_finding
from protocol.blobs.blob import Blob
from protocol.consensus.chain import Chain, genesis_head
from protocol.consensus.messages.contributions import Commit, Contribution
from protocol.consensus.messages.signed import SignedMessage
from protocol.identity import Identity
from protocol.manifest.run import Manifest
from protocol.manifest.sections import AuditSection
from tests.certificates import certify
from tests.node.small_run import PEERS, manifest_of, stated

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CPU = torch.device("cpu")
AUDITED, SECOND, THIRD = PEERS[:3]
OTHER_KIND = "cpu Other AVX512 torch 2"


def audited_manifest() -> Manifest:
    manifest = manifest_of("rounds = 4")
    model = manifest.model.model_copy(update={"vocabulary": 256})
    return manifest.model_copy(update={"model": model, "audits": AuditSection(share=1.0)})


@dataclass
class Audited:
    """A replica with its auditor; three other peers and this one contribute to the first round."""

    node: Node
    replica: Replica
    auditor: Auditor

    def __post_init__(self) -> None:
        state, manifest = self.replica.state, self.replica.manifest
        self.shared = state.replicated.state.shared_vectors(state.method)
        self.corpus = open_corpus(manifest.data, self.node.options.base)
        text = self.corpus.fingerprint(manifest.model.context)
        self.conditions = Conditions(device=device_class(CPU), text=text, microbatch=1)
        self.auditor.conditions = self.conditions
        self.auditor.remember_anchor(0, self.shared)

    def contribution(self, identity: Identity, skipped: int = 0, device: str = "") -> SignedMessage[Contribution]:
        """Return the work of a peer, which skips steps that it says it made, and names a kind of device."""
        state, manifest = self.replica.state, self.replica.manifest
        model, encoder = build_model(manifest.model, CPU), ContributionEncoder(state.planner)
        trainer = VirtualTrainer(model, manifest, state.planner, self.corpus, encoder, identity.peer_id)
        trainer.start(0, self.shared)
        settings = self.auditor._settings_at(0)
        assert settings is not None
        trainer.use_settings(settings)
        planned = state.planner.plan(0).steps
        for _ in range(planned - skipped):
            trainer.step()
        header, payloads = trainer.make_contribution()
        trainer.state.save()
        conditions = self.conditions.model_copy(update={"device": device or self.conditions.device})
        header = header.model_copy(update={"conditions": conditions})
        work = WorkLog(state.store.put, trainer.shared_memory).record(header)
        if skipped:
            work = self._lie(work.digest, planned)
        parts = tuple(state.store.put(payload) for payload in payloads)
        body = StoredContribution(header, parts, work).to_contribution(genesis_head(state.run_id), state.limits)
        body = replace(body, steps=planned) if skipped else body
        return stated(identity, replace(body, seal=bytes(32)), state.run_id)

    def _lie(self, digest: bytes, planned: int) -> Blob:
        store = self.replica.state.store
        record = WorkRecord.from_bytes(store.read(digest))
        trace = record.trace.model_copy(update={"steps": planned})
        return store.put(record.model_copy(update={"trace": trace}).to_bytes())

    def decide(self, contribution: SignedMessage[Contribution]) -> None:
        """Let two rounds be decided, so that all contributions to the first one are audited."""
        run_id = self.replica.state.run_id
        chain = self.replica.state.replicated.chain
        others = [stated(peer, contribution.body, run_id) for peer in (SECOND, THIRD, self.node.identity)]
        self._append(chain, [contribution, *others])
        late = replace(contribution.body, round=1, base=chain.digest)
        self._append(chain, [stated(peer, late, run_id) for peer in (AUDITED, SECOND)])
        self.chain, self.first = chain, contribution
        self.auditor.on_commit(chain)

    def _append(self, chain: Chain, entries: list[SignedMessage[Contribution]]) -> None:
        ordered = tuple(sorted(entries, key=lambda entry: entry.sender))
        commit = Commit(chain.round, 0, chain.digest, ordered, ())
        run_id = self.replica.state.run_id
        chain.append(certify(stated(SECOND, commit, run_id), chain, run_id, PEERS[:3], b""))

    def receive(self, auditor: Identity, verdict: Verdict) -> None:
        chain = self.chain.log.commits[1].body.base
        finding = Finding(0, chain, AUDITED.peer_id, self.first.digest, verdict)
        self.auditor.receive(sign_finding(auditor, self.replica.state.run_id, finding).signed)

    async def own_verdict(self) -> Verdict:
        """Wait for our finding on the audited peer; the others repeat its work under their keys, which is false."""
        chain = self.chain.log.commits[1].body.base
        case = self.auditor._tracker._cases[chain, AUDITED.peer_id]
        async with asyncio.timeout(250):
            while self.node.peer_id not in case.findings:
                await asyncio.sleep(0.05)
        return case.findings[self.node.peer_id].body.verdict


async def run_promptly(module: str, arguments: Sequence[str], seconds: float) -> ChildResult:
    assert module == "node.daemon.audits"
    return await run_module("tests.node.daemon.audits.prompt_audit", arguments, seconds)


@pytest.fixture
async def audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Audited]:
    monkeypatch.setattr("node.daemon.audits.auditor.run_module", run_promptly)
    (tmp_path / "a.txt").write_text("abcdefgh" * 200)
    manifest = audited_manifest()
    options = NodeOptions(
        manifest=manifest, base=tmp_path, folder=tmp_path, listen=("/ip4/127.0.0.1/tcp/0",), device="cpu", threads=1
    )
    node = Node(options, RunDir(tmp_path), random.Random(0))
    with start_workers() as workers:
        folder = RunDir(tmp_path / "replica")
        folder.path.mkdir()
        await node.add_replica(manifest, folder, workers)
        (replica,) = node.replicas.values()
        auditor = replica.work.auditor
        assert auditor is not None
        yield Audited(node, replica, auditor)
        auditor.stop()
        await node.finish()
        await node.transport.stop()


async def test_honest_work_is_equal_and_its_accuser_loses_its_key(audited: Audited) -> None:
    audited.decide(audited.contribution(AUDITED))
    audited.receive(SECOND, "different")
    assert await audited.own_verdict() == "equal"
    assert audited.auditor._conduct.excluded == frozenset()
    audited.receive(THIRD, "equal")
    assert audited.auditor._conduct.excluded == {SECOND.peer_id}
    assert audited.auditor.refusals == {"audit: false finding": 2}, "set aside, then excluded"


async def test_lazy_peer_is_excluded_by_three_of_four_votes_and_not_by_two(audited: Audited) -> None:
    audited.decide(audited.contribution(AUDITED, skipped=15))
    audited.receive(SECOND, "different")
    assert await audited.own_verdict() == "different"
    conduct, members = audited.auditor._conduct, [peer.peer_id for peer in PEERS[:4]]
    assert conduct.excluded == frozenset(), "two words"
    assert conduct.serving.struck(2, members) == {AUDITED.peer_id: "audit: doubted"}
    audited.receive(THIRD, "different")
    assert conduct.excluded == {AUDITED.peer_id}
    assert audited.auditor.refusals == {"audit: doubted": 1, "audit: lied": 1}
    (saved,) = (action for action in audited.replica.loop.conduct.take_actions() if isinstance(action, SaveProofs))
    file = audited.replica.state.conviction_file
    file.save(saved.convictions)
    assert [each.peer for each in file.load()] == [AUDITED.peer_id], "what the next process reads"


@pytest.mark.parametrize(("skipped", "verdict"), [(0, "similar"), (15, "different")])
async def test_work_of_another_kind_of_cpu_is_measured(audited: Audited, skipped: int, verdict: str) -> None:
    audited.decide(audited.contribution(AUDITED, skipped, OTHER_KIND))
    audited.receive(SECOND, "different")
    assert await audited.own_verdict() == verdict


async def test_contribution_from_before_a_restart_gets_a_record_that_says_so(audited: Audited) -> None:
    store, made = audited.replica.state.store, audited.contribution(AUDITED).body
    header = ContributionHeader(serial=1, round=0, sizes=(1,), tokens=1, steps=1, loss=1.0)
    named = record_interrupted(store.put, StoredContribution(header, made.parts))
    assert named.work is not None
    assert WorkRecord.from_bytes(store.read(named.work.digest)).find_obstacle() == "its peer was restarted"
    assert record_interrupted(store.put, named) is named

"""Whatever is killed at whatever point of a round, all progress is applied once, still to be sent, or known to be lost.

Step k adds 4 ** k to every weight, so the digits of a sum (of what was applied and what is still to be sent) say how
often each step is in it. Trainer state, checkpoints, blobs and offers are the node's own; only the swarm is a script.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from node.daemon.checkpoints import checkpoint
from node.daemon.checkpoints.checkpoint import Checkpoint, SavedChain
from node.daemon.state.contributions import (
    CONTRIBUTION_VECTOR,
    TRACKER_KEY,
    ContributionFile,
    restore_contributions,
    restore_trainer_snapshot,
    store_parts,
)
from node.loop.contributions import LastSent, StoredContribution
from node.model import shape_table
from node.run_dir import RunDir
from node.trainer.ipc.channel import ContributionOutcome
from node.trainer.ipc.shared_memory import SharedLayout, SharedMemory
from optim.compose import compose
from optim.options import Scalar
from optim.round_plan import RoundPlanner
from protocol.consensus.chain import ChainHead, extend_head, genesis_head
from protocol.consensus.messages.contributions import Commit
from tests.node.daemon.recorded_errors import RecordedErrors
from tests.node.small_run import PEERS, RUN_ID, commit_of, store_in
from tests.node.trainer.state_harness import MODEL, NUMEL, StateHarness, decoded
from tests.optim.fake_peers import Tables

pytestmark = pytest.mark.slow

ME = PEERS[1].peer_id
STEPS = 5  # their digits fit into a value of sixteen bits
SUBSET: dict[str, Scalar] = {"kind": "subset", "density": 0.5, "values": "fp16"}
SPARSE: Tables = {"codec": SUBSET | {"shared": False}, "feedback": {"kind": "error", "decay": 1.0}}
SPARSE_BY_ROUND: Tables = {"codec": SUBSET, "feedback": {"kind": "error", "decay": 1.0}}
WHOLE: Tables = {"codec": {"kind": "none"}, "feedback": {"kind": "none"}}


class CrashingNode:
    """`taken`: an x for each round that takes our message. `every`: rounds from one checkpoint to the next."""

    def __init__(self, folder: Path, tables: Tables, taken: str, every: int) -> None:
        self.tables = tables
        self.taken = taken
        self.every = every
        self.folder = RunDir(folder)
        self.store = store_in(self.folder.blobs)
        self.sent = ContributionFile(self.folder.contribution_file)
        self.chain: list[Commit] = []  # of the swarm
        self.head = genesis_head(RUN_ID)  # of the swarm
        self.applied = torch.zeros(NUMEL)
        self.steps = 0
        self.kept = range(0)  # steps that the death must not cost
        self.start(None)

    def start(self, saved: Checkpoint | None) -> None:
        """A process, and a trainer."""
        self.program = RoundPlanner(compose("sparseloco", self.tables), shape_table(MODEL).layout, 1)
        self.arena = SharedMemory.create(SharedLayout.of(self.program))
        if saved is not None:
            restore_trainer_snapshot(saved, self.arena)
        self.offers = restore_contributions(saved, self.program, self.arena, self.store, self.sent, RecordedErrors())
        self.number = 0 if saved is None else saved.round
        self.start_trainer()

    def start_trainer(self) -> None:
        self.bench = StateHarness("sparseloco", self.tables, self.arena)
        self.is_greeted = False

    def kill(self, victim: str) -> None:
        if victim == "trainer":
            snapshot = self.arena.read_snapshot()
            self.kept = range(snapshot.meta["position"] if snapshot else 0)
            self.start_trainer()
            return
        self.arena.close()
        found, _ = checkpoint.load_newest(self.folder.checkpoints, RUN_ID, shape_table(MODEL))
        last = self.sent.load()
        if found is not None and (last is None or last.contribution.header.serial <= found.inner_meta["messages"] + 1):
            self.kept = range(found.inner_meta["position"])
        self.start(found)

    def work(self) -> Iterator[None]:
        """All that is to be done, from wherever it stands; it may be killed at each yield."""
        while True:
            while self.number < len(self.chain):
                yield from self._settle()
            if not self.is_greeted:
                yield from self._greet()
            if len(self.chain) > STEPS:
                return
            if self.bench.state.counters.outstanding is None:
                yield from self._send()
            self._decide()
            yield

    def _train(self) -> None:
        if self.steps < STEPS:
            self.bench.weights.sub_(float(4**self.steps))
            self.steps += 1
            self.bench.state.count_step(24, 3.0, self.steps)

    def _send(self) -> Iterator[None]:
        state = self.bench.state
        self._train()
        yield
        state.save()
        yield
        state.make_contribution()
        yield
        state.save()
        yield
        self._take()
        yield
        self._train()  # goes on while the message travels
        yield

    def _take(self) -> None:
        outstanding = self.bench.state.counters.outstanding
        assert outstanding is not None
        message = outstanding.to_header()
        offer = StoredContribution(message, store_parts(self.store, self.arena, message))
        self.sent.save(LastSent(offer, tuple(self.offers.settled)))
        self.offers.submit(offer, self.number)

    def _greet(self) -> Iterator[None]:
        self.is_greeted, outstanding = True, self.bench.state.counters.outstanding
        if outstanding is not None and (fate := self.offers.outcome_of(outstanding.round)) != "none":
            yield from self._adopt(fate)
        elif outstanding is not None and not self.offers.is_known(outstanding.to_header()):
            self._take()
            yield

    def _decide(self) -> None:
        """A round of the swarm; what it takes is applied."""
        offer = self.offers.pending if self.taken[min(len(self.chain), STEPS - 1)] == "x" else None
        if offer is not None:
            plan, whole = self.program.plan(offer.header.round), torch.zeros(NUMEL)
            (codec,), (part,) = plan.codecs, offer.parts
            plan.scatter(codec.decode(self.store.read(part.digest), NUMEL), whole)
            self.applied += whole
        head = ChainHead(len(self.chain), self.head.digest, 0)
        self.chain.append(commit_of(head, {0: self.store.put(b"other")} | ({1: offer.parts} if offer else {})).body)
        self.head = extend_head(head, self.chain[-1])

    def _settle(self) -> Iterator[None]:
        commit = self.chain[self.number]
        fate = self.offers.on_commits(ME, [commit], self.number + 1)
        self.number += 1
        yield
        outstanding = self.bench.state.counters.outstanding
        told = self.offers.outcome_of(outstanding.round) if outstanding else fate
        yield from self._adopt(told)
        if self.number % self.every == 0:
            self._save()
            yield

    def _adopt(self, fate: ContributionOutcome) -> Iterator[None]:
        self.bench.state.apply_anchor(self.number, fate)
        yield
        self.bench.state.save()
        yield

    def _save(self) -> None:
        copied = self.arena.copy_snapshot()
        assert copied is not None
        snapshot, outbox = copied
        inner = {**snapshot.vectors, CONTRIBUTION_VECTOR: torch.frombuffer(bytearray(outbox), dtype=torch.uint8)}
        anchor, shapes = torch.zeros(NUMEL), shape_table(MODEL)
        chain = SavedChain({TRACKER_KEY: self.offers.to_json()}, b"")
        taken = Checkpoint(RUN_ID, shapes.hash(), self.number, bytes(32), chain, anchor, {}, inner, snapshot.meta)
        checkpoint.save(self.folder.checkpoints, taken, shapes, 2)

    def pending(self) -> Tensor:
        """What is still to be sent, or on its way."""
        state = self.bench.state
        progress = state.residual + state.reference - self.bench.weights
        return progress + decoded(self.bench) if state.counters.outstanding else progress


def digits(total: Tensor) -> list[set[int]]:
    """By step, how often it is in these sums."""
    whole = total.round().long()
    assert torch.equal(whole.float(), total) and bool((whole >= 0).all()), "a sum that no steps give"
    return [set((whole // 4**step % 4).unique().tolist()) for step in range(STEPS)]


def run_with_crash(folder: Path, tables: Tables, taken: str, every: int, victim: str, at: int) -> CrashingNode | None:
    """None: it is over before that point."""
    node = CrashingNode(folder, tables, taken, every)
    work = node.work()
    for _ in range(at):
        if next(work, node) is node:
            return None
    node.kill(victim)
    for _ in node.work():
        pass
    return node


@pytest.fixture(autouse=True)
def no_power_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes die here, not machines: what was written is there, and need not be waited for."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize(
    ("victim", "every", "tables", "taken"),
    [
        ("trainer", 1, SPARSE, "x-x-x"),
        ("node", 1, SPARSE, "x-x-x"),
        ("node", 2, SPARSE, "x-x-x"),
        ("node", 1, SPARSE, "-----"),
        ("node", 1, SPARSE_BY_ROUND, "x-x-x"),
        ("node", 2, WHOLE, "xxxxx"),
    ],
)
def test_a_step_counts_once(tmp_path: Path, victim: str, every: int, tables: Tables, taken: str) -> None:
    at = 0
    while (node := run_with_crash(tmp_path / f"{at}", tables, taken, every, victim, at)) is not None:
        found = digits(node.applied + node.pending())
        assert all(times <= {0, 1} for times in found), f"killed at {at}: {found}"
        assert all(found[step] == {1} for step in node.kept), f"killed at {at}: {found}, kept {node.kept}"
        node.arena.close()
        at += 1
    assert at > 30


@pytest.mark.parametrize(("tables", "taken"), [(SPARSE, "x-x-x"), (SPARSE_BY_ROUND, "x-x-x"), (WHOLE, "xxxxx")])
def test_negative_control(tmp_path: Path, tables: Tables, taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the file, what a round took since the checkpoint is sent again."""
    monkeypatch.setattr(ContributionFile, "load", lambda self: None)
    at = twice = 0
    while not twice and (node := run_with_crash(tmp_path / f"{at}", tables, taken, 1, "node", at)) is not None:
        twice += any(2 in times for times in digits(node.applied + node.pending()))
        node.arena.close()
        at += 1
    assert twice, f"in none of {at} places"

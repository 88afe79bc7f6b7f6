"""A trainer of two processes: it goes on where one rank stopped, sends what one would send, and survives a death."""

import hashlib
import os
import signal
from pathlib import Path

import psutil
import pytest
import torch

from node.data import BatchReader, open_corpus
from node.model import build_model
from node.trainer.inner_step import InnerOptimizer, accumulate_gradient
from node.trainer.ipc.channel import AnchorApplied, ApplyAnchor, ContributionHeader, Ready, Snapshotted, TakeSnapshot
from node.trainer.ipc.shared_memory import SharedMemory
from node.trainer.live import live_vectors
from node.trainer.state import TrainerState
from optim.exchange import ContributionEncoder
from tests.node.trainer.process_harness import ProcessHarness
from tests.node.trainer.state_harness import copy_arena

pytestmark = pytest.mark.slow
STEPS = 3


class OneRank:
    """A trainer of one rank in this process, with the text of a harness."""

    def __init__(self, harness: ProcessHarness, memory: SharedMemory) -> None:
        manifest, program = harness.manifest, harness.program
        self.memory = memory
        self._rows = manifest.train.batch_tokens // manifest.model.context
        self._microbatch = manifest.train.microbatch
        self._model = build_model(manifest.model)
        self._optimizer = InnerOptimizer(self._model, manifest.train, program.method.inner)
        live = live_vectors(self._model, self._optimizer)
        self.state = TrainerState(live, self._optimizer, program, ContributionEncoder(program), memory)
        if not self.state.restore():
            self.state.start(0)
        corpus = open_corpus(manifest.data, harness.folder)
        position = self.state.counters.position
        self._batches = BatchReader(corpus, manifest.model.context, manifest.run.seed, "12D3KooWtest", position)

    def contribute(self) -> ContributionHeader:
        """Make the steps of a round and a contribution of them."""
        for _ in range(STEPS):
            loss = accumulate_gradient(self._model, self._batches.next_batch(self._rows), self._microbatch)
            self.state.take_step(self._rows * 16, loss, self._batches.position)
            self._optimizer.clear_gradient()
        return self.state.make_contribution()


def digest(memory: SharedMemory) -> str:
    """Return the digest of all vectors of a trainer."""
    return hashlib.sha256(b"".join(vector.numpy().tobytes() for vector in memory.vectors.values())).hexdigest()


async def test_two_ranks_go_on_for_one_and_come_back_when_one_of_them_is_killed(tmp_path: Path) -> None:
    two = ProcessHarness(tmp_path, recipe="averaging", inner_steps=STEPS, ahead=0, devices="cpu,cpu")
    OneRank(two, two.arena).contribute()
    alone = OneRank(two, copy_arena(two.arena))
    before = digest(two.arena)
    try:
        await two.trainer.start()
        ready = await two.until(Ready)
        assert (ready.device, ready.step, ready.outstanding) == ("2 x cpu", STEPS, 0)
        await two.trainer.send(TakeSnapshot())
        await two.until(Snapshotted)
        assert digest(two.arena) == before == digest(alone.memory), "both ranks have copied all of their parts"

        for memory in (two.arena, alone.memory):
            memory.anchor(1).copy_(memory.anchor(0) + 0.01)
        await two.trainer.send(ApplyAnchor(round=1, outcome="included"))
        await two.until(AnchorApplied)
        alone.state.apply_anchor(1, "included")
        theirs, ours = await two.until(ContributionHeader), alone.contribute()
        assert (theirs.round, theirs.steps, theirs.tokens) == (1, STEPS, ours.tokens)
        assert theirs.loss == pytest.approx(ours.loss, abs=1e-6)
        for name, vector in alone.memory.vectors.items():
            torch.testing.assert_close(two.arena.vectors[name], vector, atol=1e-6, rtol=0)
        assert digest(two.arena) != before, "control: the vectors have moved"

        sent, pid = digest(two.arena), two.trainer.pid
        assert pid is not None
        (other,) = psutil.Process(pid).children()
        os.kill(other.pid, signal.SIGKILL)
        back = await two.until(Ready)
        assert (back.step, back.round, back.outstanding) == (2 * STEPS, 1, 1)
        assert two.trainer.crash_count == 1 and not psutil.pid_exists(pid)
        await two.trainer.send(TakeSnapshot())
        await two.until(Snapshotted)
        assert digest(two.arena) == sent
        one = OneRank(two, copy_arena(two.arena))
        assert one.state.counters.step == 2 * STEPS and digest(one.memory) == sent, "and one rank goes on for two"
        one.memory.close()
    finally:
        await two.close()
        alone.memory.close()

"""Play a round of one peer in one process, with all vectors that its daemon and its trainer have; print its memory.

    python -m tests.node.peer_in_one_process [--small] [--copy] [--recipe frugal] [--layers 11]

The peer makes inner steps, a contribution and an outer step, hands the new anchor to the trainer, writes a checkpoint
and starts from it. Anonymous and shared pages count, pages of files do not. `--small`: with little memory. `--copy`: it
copies the trainer's vectors before it writes them.
"""

import argparse
import re
import tempfile
import threading
from pathlib import Path

import torch

from node.daemon.checkpoints import checkpoint
from node.daemon.checkpoints.checkpoint import SavedChain
from node.daemon.state.contributions import CONTRIBUTION_VECTOR, restore_trainer_snapshot
from node.daemon.state.outer_state import OuterState, OuterVectors
from node.model import build_model, initial_weights, shape_table
from node.trainer.inner_step import InnerOptimizer, accumulate_gradient
from node.trainer.ipc.shared_memory import SharedLayout, SharedMemory
from node.trainer.live import live_vectors
from node.trainer.state import TrainerState
from optim.compose import compose, with_small_memory
from optim.exchange import Aggregator, ContributionEncoder
from optim.inner.base import WEIGHTS
from optim.kernels.warmup import warm_up
from optim.method import SMALL_SLOTS, Method
from optim.round_plan import RoundPlanner
from protocol.manifest.model import ModelSection
from protocol.manifest.sections import TrainSection

MODEL = ModelSection(vocabulary=64, width=256, layers=11, heads=4, hidden=688, context=8)  # 9 million parameters
TRAIN = TrainSection(batch_tokens=8, learning_rate=1e-3)
SAMPLE_SECONDS = 0.002
PARTS = 12
SMALL = MODEL.model_copy(update={"width": 16, "layers": 1, "hidden": 32})


class Peer:
    """Daemon and trainer of one peer, without a network."""

    def __init__(self, config: ModelSection, method: Method, folder: Path) -> None:
        self.shapes = shape_table(config)
        self.planner = RoundPlanner(method, self.shapes.layout, PARTS)
        self.memory = SharedMemory.create(SharedLayout.of(self.planner), folder)
        self.memory.write_anchor(0, [initial_weights(config, 0)])
        self.outer_vectors = OuterVectors(folder, self.planner)
        self.outer = self.outer_vectors.place(0, OuterState.initial(self.memory.anchor(0), self.planner.method))
        self.model = build_model(config)
        optimizer = InnerOptimizer(self.model, TRAIN, self.planner.method.inner)
        encoder = ContributionEncoder(self.planner)
        self.state = TrainerState(live_vectors(self.model, optimizer), optimizer, self.planner, encoder, self.memory)
        self.state.start(0)

    def step(self) -> None:
        tokens = torch.arange(9).view(1, -1) % MODEL.vocabulary
        loss = accumulate_gradient(self.model, tokens, 1)
        self.state.take_step(8, loss, 1)
        self.model.clear_gradient()

    def finish_round(self) -> None:
        header = self.state.make_contribution()
        payloads = [bytes(part) for part in self.memory.contribution_parts(header.sizes)]
        plan, aggregator, slots = self.planner.plan(0), Aggregator(self.planner), dict(self.outer.slots)
        slots |= {name: slots[name].clone() for name in SMALL_SLOTS if name in slots}
        if plan.method.topology.reduces_parts:
            payloads = [
                bytes(aggregator.reduce_part(0, part, [payload], [1.0]).payload)
                for part, payload in enumerate(payloads)
            ]
        merged = aggregator.merge(0, payloads, [1.0], slots).vector
        rooms = {WEIGHTS: self.memory.anchor_weights(1), **self.outer_vectors.rooms(1)}
        anchor, slots = self.planner.apply_outer_step(plan, self.outer.anchor, slots, merged, 1.0, [1.0], rooms)
        self.outer = self.outer_vectors.place(1, OuterState(anchor, slots))
        self.memory.write_anchor(1, self.outer.shared_vectors(self.planner.method))
        self.state.apply_anchor(1, "included")

    def save(self, folder: Path, copies: bool) -> None:
        for snapshot in self.memory.whole_snapshots():
            vectors = (
                {name: vector.clone() for name, vector in snapshot.vectors.items()} if copies else snapshot.vectors
            )
            outbox = torch.frombuffer(self.memory.contribution_buffer, dtype=torch.uint8)
            vectors = {**vectors, CONTRIBUTION_VECTOR: outbox}
            written = checkpoint.write_inner(folder, vectors, snapshot.meta, self.shapes)
        saved = checkpoint.Checkpoint(
            *("ab" * 32, self.shapes.hash(), 1, bytes(32), NO_CHAIN, self.outer.anchor, self.outer.slots, {}),
            *(written.meta, written),
        )
        checkpoint.save(folder, saved, self.shapes, 1)

    def restore(self, folder: Path) -> None:
        rooms = [
            {WEIGHTS: self.memory.anchor_weights(number), **self.outer_vectors.rooms(number)} for number in range(2)
        ]
        loaded, _ = checkpoint.load_newest(folder, "ab" * 32, self.shapes, rooms)
        assert loaded is not None
        restore_trainer_snapshot(loaded, self.memory)
        assert self.state.restore()


NO_CHAIN = SavedChain({}, b"")


def play(config: ModelSection, method: Method, copies: bool) -> int:
    """Play a round; return the number of parameters."""
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(config, method, Path(folder))
        peer.step()
        peer.finish_round()
        peer.step()
        peer.save(Path(folder), copies)
        peer.restore(Path(folder))
    return peer.planner.numel


class Sampler(threading.Thread):
    """Finds the most resident bytes of this process that are no file's."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.most = max(self.most, resident_bytes())

    def end(self) -> int:
        self._ended.set()
        self.join()
        return self.most


def resident_bytes() -> int:
    """Return the resident bytes of this process that are no file's."""
    return 1024 * sum(map(int, re.findall(r"Rss(?:Anon|Shmem):\s*(\d+)", Path("/proc/self/status").read_text())))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--copy", action="store_true")
    parser.add_argument("--recipe", default="frugal")
    parser.add_argument("--layers", type=int, default=MODEL.layers)
    options = parser.parse_args()
    torch.set_num_threads(1)
    copies, method = options.copy, compose(options.recipe)
    method = with_small_memory(method) if options.small else method
    warm_up(method)
    play(SMALL, method, copies)
    before, sampler = resident_bytes(), Sampler()
    sampler.start()
    numel = play(MODEL.model_copy(update={"layers": options.layers}), method, copies)
    print((sampler.end() - before) / numel)


if __name__ == "__main__":
    main()

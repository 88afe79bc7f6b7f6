"""A trainer's own state on an arena, and a swarm of such states that agree without a network."""

from collections.abc import Sequence

import torch
from torch import Tensor

from node.model import build_model, initial_weights, shape_table
from node.trainer.inner_step import InnerOptimizer
from node.trainer.ipc.channel import ContributionOutcome
from node.trainer.ipc.shared_memory import SharedLayout, SharedMemory
from node.trainer.live import CopiedVectors, live_vectors
from node.trainer.schedule import is_contribution_due, may_apply_anchor, must_wait
from node.trainer.state import TrainerState
from optim.compose import compose
from optim.exchange import Aggregator, ContributionEncoder
from optim.inner.base import WEIGHTS
from optim.kernels.vectors import Vector
from optim.round_plan import RoundPlanner
from protocol.manifest.model import ModelSection
from protocol.manifest.sections import TrainSection
from tests.optim.fake_peers import Tables

torch.set_num_threads(1)
MODEL = ModelSection(vocabulary=32, width=16, layers=2, heads=4, hidden=24, context=12)
TRAIN = TrainSection(batch_tokens=24, learning_rate=1e-2)
NUMEL = shape_table(MODEL).numel
PARTS = 3


def copy_arena(arena: SharedMemory) -> SharedMemory:
    """Return memory with the same content."""
    copied = SharedMemory.create(arena.layout)
    copied._map[:] = arena._map[:]
    return copied


class StateHarness:
    """One state. Without an arena it has its own, whose anchor of round 0 is the model's first weights.

    With `copies` the model has its own memory, as on an accelerator.
    """

    def __init__(
        self,
        recipe: str,
        tables: Tables | None = None,
        arena: SharedMemory | None = None,
        device: str = "cpu",
        *,
        copies: bool = False,
    ) -> None:
        self.program = RoundPlanner(compose(recipe, tables or {}), shape_table(MODEL).layout, PARTS)
        self._owns = arena is None
        self.arena = arena or SharedMemory.create(SharedLayout.of(self.program))
        if self._owns:
            self.share(0, initial_weights(MODEL, 0))
        self.model = build_model(MODEL, device)
        self.optimizer = InnerOptimizer(self.model, TRAIN, self.program.method.inner)
        if device != "cpu":
            self.arena.pin()
        live = CopiedVectors(self.model, self.optimizer) if copies else live_vectors(self.model, self.optimizer)
        self.state = TrainerState(live, self.optimizer, self.program, ContributionEncoder(self.program), self.arena)
        if not self.state.restore():
            self.state.start(0)

    def close(self) -> None:
        if self._owns:
            self.arena.close()

    def share(self, round_number: int, anchor: Tensor, *others: Tensor) -> None:
        """What all agree on after that many rounds; the vectors that are not given are zero."""
        vectors = self.arena.anchor(round_number)
        vectors.zero_()
        vectors[: NUMEL * (1 + len(others))] = torch.cat([anchor, *others])

    @property
    def weights(self) -> Tensor:
        """The memory itself."""
        return self.vectors[WEIGHTS]

    @property
    def vectors(self) -> dict[str, Tensor]:
        return {**self.state.vectors.by_name, WEIGHTS: self.model.flat, **self.optimizer.vectors}

    @property
    def anchor(self) -> Tensor:
        return self.arena.anchor(self.state.counters.round)[:NUMEL]

    def train(self, seed: int, steps: int = 2, scale: float = 1e-2) -> Tensor:
        """Move the weights, and count steps; returns by how much they moved."""
        before = self.weights.clone()
        moved = scale * torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))
        self.weights.add_(moved.to(self.weights.device))
        for _ in range(steps):
            self.state.count_step(24, 3.0, self.state.counters.position + 2)
        return self.weights - before

    def is_message_due(self) -> bool:
        plan = self.state.plan
        return is_contribution_due(self.state.counters, plan.steps, plan.method.schedule, 0.0)

    def payloads(self) -> list[bytes]:
        outstanding = self.state.counters.outstanding
        assert outstanding is not None
        return [bytes(part) for part in self.arena.contribution_parts(outstanding.sizes)]


def decoded(bench: StateHarness) -> Tensor:
    """The message in the outbox as the others read it; zero where its round sends nothing."""
    outstanding = bench.state.counters.outstanding
    assert outstanding is not None
    plan, whole = bench.program.plan(outstanding.round), torch.zeros(bench.program.signal_numel)
    parts = [
        codec.decode(payload, stop - start)
        for codec, payload, (start, stop) in zip(plan.codecs, bench.payloads(), plan.part_spans, strict=True)
    ]
    plan.scatter(torch.cat(parts), whole)
    return whole


class Swarm:
    """Peers at the same pace, step by step.

    `anchors`: before each round so far. What a peer trains does not depend on its weights.
    """

    def __init__(self, recipe: str, tables: Tables, peers: int) -> None:
        self.peers = [StateHarness(recipe, tables) for _ in range(peers)]
        self.program = self.peers[0].program
        self.anchors = [initial_weights(MODEL, 0)]
        method = self.program.method
        self.slots = {name: torch.zeros(method.slot_numel(name, NUMEL)) for name in method.slots}
        self.sent = [torch.zeros(self.program.signal_numel) for _ in self.peers]  # the sum of what was included
        self.progress = [torch.zeros(NUMEL) for _ in self.peers]
        self.dropped: set[tuple[int, int]] = set()  # round and peer whose message is left out
        self._fates: list[ContributionOutcome] = ["none"] * peers
        self.step_number = 0

    def close(self) -> None:
        for peer in self.peers:
            peer.close()

    def step(self) -> None:
        """What a trainer's loop does, and one step of training."""
        for index, peer in enumerate(self.peers):
            self._adopt(index, peer)
        if self._may_send():
            self._exchange()
            for index, peer in enumerate(self.peers):
                self._adopt(index, peer)
        self.step_number += 1
        for index, peer in enumerate(self.peers):
            assert not must_wait(peer.state.counters, peer.state.plan)
            self.progress[index] += peer.train(1000 * self.step_number + index, steps=1)

    def _may_send(self) -> bool:
        return all(peer.is_message_due() for peer in self.peers)

    def _adopt(self, index: int, peer: StateHarness) -> None:
        number = len(self.anchors) - 1
        if peer.state.counters.round < number and may_apply_anchor(peer.state.counters, peer.state.plan):
            peer.share(
                number, self.anchors[number], *(self.slots[n] for n in self.program.method.signal.shared_names[1:])
            )
            peer.state.apply_anchor(number, self._fates[index])

    def _exchange(self) -> None:
        number = len(self.anchors) - 1
        for peer in self.peers:
            peer.state.make_contribution()
        kept = [index for index in range(len(self.peers)) if (number, index) not in self.dropped]
        self._fates = ["included" if index in kept else "excluded" for index in range(len(self.peers))]
        plan = self.program.plan(number)
        merged = self._merged(number, [self.peers[index].payloads() for index in kept])
        anchor, self.slots = self.program.apply_outer_step(
            plan, self.anchors[-1], self.slots, merged, 1.0, [1.0] * len(kept)
        )
        for index in kept:
            self.sent[index] += decoded(self.peers[index])
        self.anchors.append(anchor)

    def _merged(self, number: int, messages: Sequence[Sequence[bytes]]) -> Vector:
        merger, weights = Aggregator(self.program), [1.0] * len(messages)
        plan = self.program.plan(number)
        if plan.method.topology.kind != "butterfly":
            return merger.merge(number, [parts[0] for parts in messages], weights, self.slots).vector
        parts = range(len(plan.part_spans))
        reduced = [merger.reduce_part(number, i, [m[i] for m in messages], weights).payload for i in parts]
        return merger.merge(number, reduced, (), self.slots).vector

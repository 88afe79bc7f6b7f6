"""A trainer counts the tokens of each expert, and sends the experts that it has trained."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from node.model import build_model, initial_weights, shape_table
from node.trainer.inner_step import InnerOptimizer, accumulate_gradient
from node.trainer.ipc.shared_memory import SharedLayout, SharedMemory
from node.trainer.live import live_vectors
from node.trainer.state import TrainerState
from optim.compose import compose
from optim.exchange import ContributionEncoder
from optim.experts import TrainedExpertsCodec
from optim.round_plan import RoundPlanner
from protocol.manifest.model import ModelSection
from protocol.manifest.sections import TrainSection

torch.set_num_threads(1)
MODEL = ModelSection(
    kind="qwen3-moe", vocabulary=32, width=16, layers=2, heads=4, hidden=16, context=12,
    experts=4, experts_per_token=1, balance_loss=0.0,
)  # fmt: skip
TRAIN = TrainSection(batch_tokens=48, learning_rate=1e-2)
LAYOUT = shape_table(MODEL).layout
TABLES = {"codec": {"kind": "none"}, "schedule": {"experts": "trained"}, "topology": {"kind": "gather"}}


def preferring(first: int) -> Tensor:
    """Return weights by which all tokens go to one of two neighbouring experts."""
    weights = initial_weights(MODEL, 0)
    views = shape_table(MODEL).views(weights)
    views["model.embed_tokens.weight"] += 0.5
    for layer in range(MODEL.layers):
        views[f"model.layers.{layer}.mlp.gate.weight"][first : first + 2] += 0.3
    return weights


@pytest.fixture
def arena() -> Iterator[SharedMemory]:
    made = SharedMemory.create(SharedLayout.of(RoundPlanner(compose("diloco", TABLES), LAYOUT, 1)))
    made.anchor(0).copy_(preferring(0))
    yield made
    made.close()


class Trainer:
    def __init__(self, arena: SharedMemory) -> None:
        planner = RoundPlanner(compose("diloco", TABLES), LAYOUT, 1)
        self.model, self.arena = build_model(MODEL), arena
        optimizer = InnerOptimizer(self.model, TRAIN, planner.method.inner)
        live = live_vectors(self.model, optimizer)
        self.optimizer = optimizer
        self.state = TrainerState(live, optimizer, planner, ContributionEncoder(planner), arena)
        if not self.state.restore():
            self.state.start(0)

    def step(self, seed: int) -> None:
        windows = torch.randint(32, (4, 13), generator=torch.Generator().manual_seed(seed))
        loss = accumulate_gradient(self.model, windows, 2)
        assert self.state.take_step(48, loss, 4) is not None
        self.optimizer.clear_gradient()

    def contribute(self) -> list[bool]:
        """Return for each expert whether a contribution has it."""
        header = self.state.make_contribution()
        [part] = self.arena.contribution_parts(header.sizes)
        [codec] = self.state.plan.codecs
        assert isinstance(codec, TrainedExpertsCodec)
        return [bool(flag) for flag in codec.read_sent(bytes(part))]


def test_a_trainer_sends_the_experts_that_its_router_chose_and_keeps_the_others(arena: SharedMemory) -> None:
    trainer = Trainer(arena)
    for seed in range(3):
        trainer.step(seed)
    counts, before = trainer.state.counters.routed, trainer.model.flat.clone()
    assert sum(counts) == 3 * 48 * MODEL.layers
    delta = arena.anchor(0) - before
    sent = trainer.contribute()
    assert sent == [count > 0 and count >= 48 * 3 / 4 / 4 for count in counts] and 2 <= sum(sent) <= 6
    residual = trainer.state.residual
    for (start, stop), is_sent in zip(LAYOUT.expert_spans, sent, strict=True):
        expected = torch.zeros(stop - start) if is_sent else delta[start:stop]
        assert torch.equal(residual[start:stop], expected)
    assert trainer.state.counters.routed == tuple(
        0 if is_sent else count for count, is_sent in zip(counts, sent, strict=True)
    )


def test_a_trainer_that_starts_again_knows_the_tokens_of_its_experts(arena: SharedMemory) -> None:
    first = Trainer(arena)
    first.step(0)
    second = Trainer(arena)
    assert second.state.counters.routed == first.state.counters.routed
    assert second.contribute() == [count > 3 for count in first.state.counters.routed]

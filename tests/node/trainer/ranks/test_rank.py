"""Several ranks make the steps that one would make, and each holds its own part only."""

from typing import Any

import pytest
import torch
from torch import Tensor

from node.from_manifest import build_program
from node.model import build_model, initial_weights
from node.options import TrainerOptions
from node.trainer import inner_step
from node.trainer.devices.device import MicrobatchTooLarge
from node.trainer.inner_step import validation_loss
from node.trainer.ipc.shared_memory import SharedLayout, SharedMemory
from node.trainer.ranks import rank as rank_module
from node.trainer.ranks.group import RankGroup
from node.trainer.ranks.messages import MeasureLoss
from node.trainer.ranks.rank import Rank
from node.trainer.ranks.shards import Piece, own_pieces
from optim.inner.base import FIRST_MOMENT, WEIGHTS
from protocol.manifest.reading import parse_manifest
from protocol.manifest.run import Manifest
from tests.node.trainer.ranks.threaded_ranks import (
    Vectors,
    batch_of,
    command_for,
    on_all_ranks,
    train_alone,
    train_together,
)

TOML = """
[run]
name = "ranks"
[model]
vocabulary = 31
width = 16
layers = 2
heads = 4
kv_heads = 2
hidden = 24
context = 12
{model}
[data]
source = "text"
path = "*.txt"
[train]
batch_tokens = 60
microbatch = 2
learning_rate = 1e-2
clip = {clip}
[method]
recipe = "{recipe}"
"""
EXPERTS = 'kind = "qwen3-moe"\nexperts = 4\nexperts_per_token = 1\nbalance_loss = 0.0'
MUON = '"\ninner = { kind = "muon" }\n#'
BRAKING = MUON.replace("muon", "adaptive-braking")
STEPS = 3
REAL_ALL_REDUCE = torch.distributed.all_reduce


def manifest_of(recipe: str = "frugal", model: str = "", clip: float = 0.2) -> Manifest:
    return parse_manifest(TOML.format(recipe=recipe, model=model, clip=clip).encode(), "test")


def greatest_difference(vectors: Vectors, others: Vectors) -> float:
    assert vectors.keys() == others.keys()
    return max(float((vectors[name] - others[name]).abs().max()) for name in vectors)


@pytest.mark.parametrize(
    ("recipe", "model", "ranks", "rows", "tolerance"),
    [
        ("frugal", "", 2, 5, 1e-6),
        ("frugal", "tied = false", 3, 4, 1e-6),  # a vocabulary of 31 rows, and passes for company
        ("averaging", 'kind = "qwen3"', 2, 1, 1e-6),  # fewer sequences than ranks
        ("frugal", EXPERTS, 2, 6, 1e-5),  # experts without tokens on a rank; few tokens, so AdamW enlarges rounding
        ("distro", "", 2, 5, 1e-6),
        (f"frugal{MUON}", "tied = false", 3, 4, 1e-5),
        (f"frugal{BRAKING}", "", 2, 5, 1e-6),
    ],
)
def test_ranks_make_the_steps_of_one(recipe: str, model: str, ranks: int, rows: int, tolerance: float) -> None:
    manifest = manifest_of(recipe, model)
    alone, together = train_alone(manifest, STEPS, rows), train_together(manifest, ranks, STEPS, rows)
    assert greatest_difference(alone, together) < tolerance


@pytest.mark.parametrize(("ranks", "rows"), [(2, 6), (3, 2)], ids=["two", "one for company"])
def test_ranks_count_the_tokens_of_all_for_each_expert(ranks: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: ranks that count for themselves may leave out an expert that another one has trained."""
    manifest = manifest_of("frugal", EXPERTS)
    weights, inner = initial_weights(manifest.model, 0), build_program(manifest).method.inner
    model = build_model(manifest.model)
    model.load_flat(weights)
    inner_step.accumulate_gradient(model, batch_of(manifest, 0, rows), manifest.train.microbatch)
    alone = model.take_routed_tokens()
    assert sum(alone) == manifest.model.layers * rows * manifest.model.context

    def count(group: RankGroup) -> list[tuple[int, ...]]:
        rank = Rank(manifest, inner, manifest.train.microbatch, group, None)
        rank.load({WEIGHTS: weights} | {name: torch.zeros_like(weights) for name in inner.vectors})
        return [count_in_step(rank, step) for step in (0, 0)]

    def count_in_step(rank: Rank, step: int) -> tuple[int, ...]:
        rank.accumulate_gradient(command_for(manifest, step, rows), batch_of(manifest, step, rows))
        rank.optimizer.clear_gradient()
        return rank.optimizer.take_routed_tokens()

    assert on_all_ranks(ranks, count) == [[alone, alone]] * ranks
    monkeypatch.setattr(RankGroup, "sum", lambda self, *values: list(values))
    assert all(sum(counts) < sum(alone) for counts in sum(on_all_ranks(ranks, count), []))


@pytest.mark.parametrize("recipe", ["frugal", "frugal" + MUON])
def test_two_copies_of_the_model_in_two_parts_each_train_like_one_rank(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HSDP: parts inside a machine, copies between machines. Control: copies that do not add up their gradients."""
    manifest = manifest_of(recipe)
    alone, together = train_alone(manifest, STEPS, 9), train_together(manifest, 4, STEPS, 9, copies=2)
    assert greatest_difference(alone, together) < (1e-6 if recipe == "frugal" else 1e-5)
    monkeypatch.setattr("torch.distributed.all_reduce", sum_of_all_ranks_only)
    assert greatest_difference(alone, train_together(manifest, 4, STEPS, 9, copies=2)) > 1e-4


def sum_of_all_ranks_only(tensor: Tensor, *, group: object = None, **values: Any) -> None:
    """Add up losses and norms, but not the gradients of copies."""
    if group is None:
        REAL_ALL_REDUCE(tensor)


# A token that goes to all experts: with fewer, rounding decides between experts that the router likes equally well, and
# the tokens that then change their expert differ from one processor to the next and hide the distance measured here.
@pytest.mark.parametrize("model", ['kind = "qwen3"', EXPERTS.replace("per_token = 1", "per_token = 4")])
def test_ranks_that_gather_bf16_train_like_one_with_autocast(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and the router compute in fp32 with gains and rows that were gathered in bf16.

    Control: ranks that do not add up their gradients are further away than fp32.
    """
    for module in (rank_module, inner_step):
        monkeypatch.setattr(module, "autocast_context", lambda _: torch.autocast("cpu", torch.bfloat16))
    manifest = manifest_of("frugal", model)
    alone = train_alone(manifest, STEPS, 4)
    monkeypatch.setattr(rank_module, "uses_bf16", lambda _: True)
    together = train_together(manifest, 2, STEPS, 4)
    monkeypatch.setattr("torch.distributed.reduce_scatter_single", scatter_own)
    apart = train_together(manifest, 2, STEPS, 4)
    monkeypatch.undo()
    exact = train_alone(manifest, STEPS, 4)
    assert 0 < distance(together, alone) < distance(exact, alone) / 2, "they differ by less than bf16 from fp32"
    assert distance(apart, alone) > distance(exact, alone)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(("model", "programs"), [("", 4), (EXPERTS, 6)])
def test_ranks_with_compiled_layers_train_like_one_with_autocast(
    model: str, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All eight layers share their programs, although each has its own weights.

    Control: ranks that do not add up their gradients are further away than bf16 products from fp32 ones.
    """
    base = manifest_of("frugal", model)
    manifest = base.model_copy(update={"model": base.model.model_copy(update={"layers": 8})})
    torch._dynamo.reset()
    counted = torch._dynamo.utils.counters["stats"]
    counted.clear()
    together = train_together(manifest, 2, STEPS, 4, options=TrainerOptions(compile=True))
    assert 0 < counted["unique_graphs"] <= programs
    exact = train_alone(manifest, STEPS, 4)
    monkeypatch.setattr("torch.distributed.reduce_scatter_single", scatter_own)
    apart = train_together(manifest, 2, STEPS, 4)
    assert 0 < distance(together, exact) < distance(apart, exact) / 4


def distance(vectors: Vectors, others: Vectors) -> float:
    return float((vectors[FIRST_MOMENT] - others[FIRST_MOMENT]).norm())


def whole_batch(windows: Tensor, ranks: int, rank: int, microbatch: int) -> list[Piece]:
    return own_pieces(windows, 1, 0, microbatch)


def without_others(group: RankGroup, *values: float) -> list[float]:
    return list(values)


@pytest.mark.parametrize("fault", ["whole batch", "own norm", "own gradient"])
def test_ranks_with_a_fault_make_other_steps(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    if fault == "whole batch":
        monkeypatch.setattr(rank_module, "own_pieces", whole_batch)
    elif fault == "own norm":
        monkeypatch.setattr(RankGroup, "sum", without_others)
    else:
        monkeypatch.setattr("torch.distributed.reduce_scatter_single", scatter_own)
    manifest = manifest_of(clip=0.2 if fault == "own norm" else 100.0)  # clipping hides a gradient that is too long
    assert greatest_difference(train_alone(manifest, STEPS, 5), train_together(manifest, 2, STEPS, 5)) > 1e-4


def scatter_own(*, output: Tensor, group: torch.distributed.ProcessGroup, **values: Any) -> None:
    """Give a rank its part of its own gradient, without those of the others."""
    output.copy_(values["input"].view(group.size(), -1)[group.rank()])


def test_validation_loss_is_that_of_one_rank() -> None:
    manifest = manifest_of()
    program = build_program(manifest)
    memory = SharedMemory.create(SharedLayout.of(program))
    weights, batches = initial_weights(manifest.model, 7), [batch_of(manifest, 0, 5), batch_of(manifest, 1, 1)]
    memory.anchor(3).copy_(weights)

    def work(group: RankGroup) -> tuple[float, int]:
        rank = Rank(manifest, program.method.inner, 2, group, memory)
        rank.load({name: torch.ones_like(vector) for name, vector in memory.vectors.items()})
        found = rank.measure_loss(MeasureLoss(round=3, rows=(5, 1)), [batch.clone() for batch in batches])
        for _, own in rank.parts:
            assert torch.equal(own, torch.ones_like(own)), "the rank has its own weights again"
        return found

    try:
        found = on_all_ranks(2, work)
    finally:
        memory.close()
    model = build_model(manifest.model)
    loss, tokens = validation_loss(model, weights, batches)
    assert found[0] == found[1] and found[0][1] == tokens
    assert found[0][0] == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize(("rows", "error"), [(4, MicrobatchTooLarge), (1, torch.OutOfMemoryError)])
def test_rank_without_memory_asks_for_smaller_microbatches(
    rows: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: with microbatches of one sequence it is the error itself."""

    def run_out(rank: Rank, windows: Tensor) -> Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Rank, "_loss", run_out)
    text = manifest_of()
    manifest = text.model_copy(update={"train": text.train.model_copy(update={"microbatch": min(rows, 2)})})
    with pytest.raises(error):
        train_together(manifest, 1, 1, rows)

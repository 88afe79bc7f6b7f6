"""A model that is cut into stages computes the same bits as the whole one."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from node.daemon.checkpoints.checkpoint import Checkpoint, SavedChain, load_newest, save
from node.from_manifest import learning_rate_scale
from node.model import WHOLE, Cut, LanguageModel, all_cuts, build_model, initial_weights, shape_table, stage_slice
from node.model.families import FAMILIES
from node.model.memory_estimate import fixed_bytes, microbatch_bytes
from node.model.shapes import deal_blocks
from node.trainer.inner_step import InnerOptimizer
from node.trainer.stages.stage_pass import backward_stage, finish_microbatch, forward_stage
from optim.inner.adamw import AdamW
from optim.inner.base import InnerUpdateRule
from optim.inner.muon import Muon
from protocol.errors import ManifestError
from protocol.manifest.model import ModelSection
from protocol.manifest.sections import TrainSection
from tests.node.small_run import MANIFEST

torch.set_num_threads(1)
CONFIG = ModelSection(vocabulary=32, width=16, layers=5, heads=4, kv_heads=2, hidden=24, context=12, tied=False)
QWEN3 = CONFIG.model_copy(update={"kind": "qwen3", "head_size": 6})
MOE = CONFIG.model_copy(
    update={"kind": "qwen3-moe", "experts": 4, "experts_per_token": 2, "hidden": 8, "balance_loss": 0.5}
)
WIDE = CONFIG.model_copy(update={"width": 256, "layers": 4, "hidden": 520, "context": 8})  # rows are shared, not copied
TRAIN = TrainSection(batch_tokens=36, learning_rate=1e-2)
every_cut = pytest.mark.parametrize("stages", [1, 2, 3, 4])


def prepared(config: ModelSection, cut: Cut = WHOLE) -> LanguageModel:
    model = build_model(config, cut=cut)
    model.load_flat(initial_weights(config, 3, cut))
    return model


def microbatch(config: ModelSection, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocabulary, (3, config.context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def gradient_of(model: LanguageModel) -> Tensor:
    assert model.flat_gradient is not None
    return model.flat_gradient.clone()


def run_whole(model: LanguageModel, seed: int = 0) -> float:
    tokens, targets = microbatch(model.config, seed)
    loss: Tensor = model(tokens, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def run_stages(stages: list[LanguageModel], seed: int = 0) -> float:
    """Run a microbatch through all stages and back, keeping each stage's input alone."""
    tokens, targets = microbatch(stages[0].config, seed)
    inputs = [tokens]
    for stage in stages[:-1]:
        inputs.append(forward_stage(stage, inputs[-1]))
        assert not inputs[-1].requires_grad
    loss, gradient = finish_microbatch(stages[-1], inputs[-1], targets, 1.0)
    for stage, given in zip(stages[-2::-1], inputs[-2::-1], strict=True):
        assert gradient is not None and gradient.shape == (3, stage.config.context, stage.config.width)
        gradient = backward_stage(stage, given, gradient)
    assert gradient is None, "token ids have none"
    return loss


@every_cut
@pytest.mark.parametrize("config", [CONFIG, WIDE, QWEN3, MOE], ids=["small", "wide", "qwen3", "experts"])
def test_loss_and_gradient_through_stages_are_bit_equal_to_the_whole_models(config: ModelSection, stages: int) -> None:
    whole, parts = prepared(config), [prepared(config, cut) for cut in all_cuts(stages)]
    for seed in range(2):
        assert run_stages(parts, seed) == run_whole(whole, seed)
    gradient = torch.cat([gradient_of(part) for part in parts])
    assert gradient.any() and torch.equal(gradient, gradient_of(whole))


def test_backward_by_recomputation_is_bit_equal_to_a_direct_one_and_depends_on_the_weights() -> None:
    cut = Cut(1, 3)
    direct, recomputing, other = (prepared(CONFIG, cut) for _ in range(3))
    stream = torch.randn(3, CONFIG.context, CONFIG.width, generator=torch.Generator().manual_seed(0))
    above = torch.randn(stream.shape, generator=torch.Generator().manual_seed(1))
    leaf = stream.clone().requires_grad_()
    output = direct(leaf)
    output.backward(above)
    assert torch.equal(forward_stage(recomputing, stream), output)
    found = backward_stage(recomputing, stream, above)
    assert found is not None and leaf.grad is not None and torch.equal(found, leaf.grad)
    assert torch.equal(gradient_of(recomputing), gradient_of(direct))
    other.flat.mul_(1.01)  # the control: a forward pass at other weights
    assert not torch.equal(backward_stage(other, stream, above), found)  # type: ignore[arg-type]


@every_cut
def test_shapes_and_initial_weights_of_stages_are_slices_of_the_whole(stages: int) -> None:
    whole, table, cuts = initial_weights(CONFIG, 3), shape_table(CONFIG), all_cuts(stages)
    assert sum((shape_table(CONFIG, cut).entries for cut in cuts), ()) == table.entries
    for cut in cuts:
        assert torch.equal(initial_weights(CONFIG, 3, cut), whole[stage_slice(CONFIG, cut)])
        assert tuple(dict(prepared(CONFIG, cut).named_parameters())) == shape_table(CONFIG, cut).names
    assert [cut.has_embedding for cut in cuts] == [True] + [False] * (stages - 1)
    assert [cut.has_head for cut in cuts] == [False] * (stages - 1) + [True]
    hashes = {shape_table(CONFIG, cut).hash() for cut in (WHOLE, *cuts)}
    assert len(hashes) == (1 if stages == 1 else stages + 1)


@pytest.mark.parametrize(("vocabulary", "layers"), [(32, [2, 2, 1]), (4096, [2, 2, 1]), (32, [3, 3, 3])])
def test_stages_are_as_even_as_layers_and_head_allow(vocabulary: int, layers: list[int]) -> None:
    config = CONFIG.model_copy(update={"layers": sum(layers), "vocabulary": vocabulary})
    work = FAMILIES["llama"].block_work(config)
    ranges = deal_blocks(work, len(layers))
    assert list(itertools.chain(*ranges)) == list(range(len(work)))
    sizes = [len(part) for part in ranges]
    assert [sizes[0] - 1, *sizes[1:-1], sizes[-1] - 1] == layers


def test_a_large_output_matrix_leaves_the_last_stage_fewer_layers() -> None:
    config = CONFIG.model_copy(update={"layers": 12, "vocabulary": 512})  # the head weighs as much as 4 layers
    assert [len(part) for part in deal_blocks(FAMILIES["llama"].block_work(config), 3)] == [7, 5, 2]


def test_stages_have_layers_by_the_speed_of_their_peers() -> None:
    config = CONFIG.model_copy(update={"layers": 15, "vocabulary": 32})
    work, speeds = FAMILIES["llama"].block_work(config), (1.0, 2.0, 4.0, 8.0)
    assert [len(part) for part in deal_blocks(work, 4, speeds)] == [2, 2, 4, 9]
    assert deal_blocks(work, 4, (3.0,) * 4) == deal_blocks(work, 4)
    assert deal_blocks(work, 4, (1.0, 1.0, 1.0, 1e4))[0] == range(2), "each stage has a layer"
    whole, cuts = shape_table(config), all_cuts(4, speeds)
    assert sum((shape_table(config, cut).entries for cut in cuts), ()) == whole.entries
    weights = initial_weights(config, 3)
    for cut in cuts:
        assert torch.equal(initial_weights(config, 3, cut), weights[stage_slice(config, cut)])


def test_what_cannot_be_cut_is_one_line_that_names_the_key_to_change() -> None:
    tied = CONFIG.model_copy(update={"tied": True})
    with pytest.raises(ManifestError, match=r"^model\.tied: .*; write tied = false$") as caught:
        shape_table(tied, Cut(0, 2))
    assert caught.value.keys == ("model", "tied")
    with pytest.raises(ManifestError, match=r"^pipeline\.stages: 6 stages .*; write at most 5$") as caught:
        initial_weights(CONFIG, 0, Cut(0, 6))
    assert caught.value.keys == ("pipeline", "stages")
    with pytest.raises(ManifestError, match=r"^model\.tied"):
        build_model(tied, cut=Cut(1, 2))
    assert shape_table(tied, WHOLE) == shape_table(tied)
    for stage, stages in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="there is no stage"):
            Cut(stage, stages)
    with pytest.raises(ValueError, match="only the last stage"):
        prepared(CONFIG, Cut(0, 2))(*microbatch(CONFIG))


@pytest.mark.parametrize("inner", [AdamW(), Muon()], ids=lambda rule: rule.kind)
def test_stages_with_their_own_optimizers_step_as_the_whole_model(inner: InnerUpdateRule) -> None:
    whole, parts = prepared(CONFIG), [prepared(CONFIG, cut) for cut in all_cuts(4)]
    unclipped = TRAIN.model_copy(update={"clip": 1e6})
    models = [whole, *parts]
    optimizers = [InnerOptimizer(model, unclipped, inner) for model in models]
    for step in range(3):
        assert run_stages(parts, step) == run_whole(whole, step)
        for optimizer in optimizers:
            optimizer.step(step)
            optimizer.clear_gradient()
    assert learning_rate_scale(unclipped, 2) == 1
    assert torch.equal(torch.cat([part.flat for part in parts]), whole.flat)
    moments = [torch.cat([optimizer.vectors[name] for optimizer in optimizers[1:]]) for name in optimizers[0].vectors]
    assert all(torch.equal(a, b) for a, b in zip(moments, optimizers[0].vectors.values(), strict=True))


def test_memory_of_stages_adds_up_and_only_the_last_has_logits() -> None:
    manifest = MANIFEST.model_copy(update={"model": CONFIG})
    cuts = all_cuts(4)
    parts = [fixed_bytes(manifest, "cuda", cut) for cut in cuts]
    assert sum(parts) == fixed_bytes(manifest, "cuda") and max(parts) < fixed_bytes(manifest, "cuda") / 2
    sequences = [microbatch_bytes(manifest, 1, "cuda", cut) for cut in cuts]
    assert sum(sequences) == pytest.approx(microbatch_bytes(manifest, 1, "cuda"), abs=4)
    large = manifest.model_copy(update={"model": CONFIG.model_copy(update={"vocabulary": 2**17})})
    grown = [microbatch_bytes(large, 1, "cuda", cut) - old for cut, old in zip(cuts, sequences, strict=True)]
    assert grown[-1] > 0 and grown[1] == 0
    assert fixed_bytes(large, "cuda", cuts[0]) > fixed_bytes(manifest, "cuda", cuts[0]), "the embedding"


def test_checkpoint_of_a_stage_is_loaded_by_its_own_shapes_only(tmp_path: Path) -> None:
    cut = Cut(1, 3)
    shapes, anchor = shape_table(CONFIG, cut), initial_weights(CONFIG, 3, cut)
    body = Checkpoint("stage", shapes.hash(), 4, bytes(32), SavedChain({}, b""), anchor, {"m": anchor * 2}, {}, {})
    save(tmp_path, body, shapes, keep=2)
    loaded, _ = load_newest(tmp_path, "stage", shapes)
    assert loaded is not None and torch.equal(loaded.anchor, anchor) and torch.equal(loaded.outer["m"], anchor * 2)

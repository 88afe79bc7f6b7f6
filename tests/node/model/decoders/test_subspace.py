"""A stream in a subspace: the same function as a model of ordinary matrices, also through stages."""

import pytest
import torch
from torch import Tensor

from node.model import LanguageModel, all_cuts, build_model, initial_weights, model_family, shape_table
from node.model.decoders.subspace import ROW_DEVIATION, Subspace, make_basis
from node.trainer.inner_step import InnerOptimizer
from node.trainer.stages.stage_pass import backward_stage, finish_microbatch, forward_stage
from optim.inner.adamw import AdamW
from protocol.manifest.model import ModelSection
from protocol.manifest.sections import TrainSection

torch.set_num_threads(1)
CONFIG = ModelSection(
    vocabulary=300, width=32, layers=4, heads=4, kv_heads=2, hidden=48, context=12, tied=False, subspace=8
)
QWEN = CONFIG.model_copy(update={"kind": "qwen3", "head_size": 6})
MOE = CONFIG.model_copy(update={"kind": "qwen3-moe", "experts": 4, "experts_per_token": 2})
STAGES = 4


def prepared(config: ModelSection) -> LanguageModel:
    model = build_model(config)
    model.load_flat(initial_weights(config, 3))
    return model


def microbatch() -> tuple[Tensor, Tensor]:
    windows = torch.randint(CONFIG.vocabulary, (3, CONFIG.context + 1), generator=torch.Generator().manual_seed(0))
    return windows[:, :-1], windows[:, 1:]


def gradient_of(model: LanguageModel) -> Tensor:
    assert model.flat_gradient is not None
    return model.flat_gradient


def train(model: LanguageModel, steps: int) -> None:
    optimizer = InnerOptimizer(model, TrainSection(batch_tokens=36, learning_rate=1e-2), AdamW())
    for step in range(steps):
        finish_microbatch(model, *microbatch(), 1.0)
        optimizer.step(step)
        optimizer.clear_gradient()


def multiplied_out(model: LanguageModel) -> LanguageModel:
    """Return a model of ordinary matrices that computes the same."""
    config = model.config.model_copy(update={"subspace": None})
    views = shape_table(model.config).views(model.flat)
    weights = model_family(config).hugging_face_weights(model.config, views)
    ordinary = build_model(config)
    shape_table(config).copy_named(ordinary.flat, weights)
    return ordinary


@pytest.mark.parametrize("config", [CONFIG, QWEN, MOE], ids=["llama", "qwen3", "experts"])
def test_model_computes_what_its_multiplied_out_matrices_compute(config: ModelSection) -> None:
    model, (tokens, _) = prepared(config), microbatch()
    train(model, 5)
    with torch.no_grad():
        expected = multiplied_out(model)(tokens)
        torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-5)
        model.flat.mul_(1.01)  # the control: other factors
        assert (model(tokens) - expected).abs().max() > 1e-3


def test_training_never_leaves_the_subspace() -> None:
    """Compare with an ordinary model that starts with the same function."""
    model, (tokens, _) = prepared(CONFIG), microbatch()
    ordinary = multiplied_out(model)
    subspace = Subspace(CONFIG, "cpu")

    def distance(trained: LanguageModel) -> float:
        """Return how far the streams after all layers are from rows plus the subspace."""
        stream = tokens
        for block in trained.blocks[:-1]:
            stream = block(stream)
        nearest = subspace.expand(subspace.compress(stream, tokens), tokens)
        return float((stream - nearest).norm() / stream.norm())

    with torch.no_grad():
        assert max(distance(model), distance(ordinary)) < 1e-6
    train(model, 5)
    train(ordinary, 5)
    with torch.no_grad():
        assert distance(model) < 1e-6 < 0.1 < distance(ordinary)


def test_loss_and_gradient_through_stages_are_those_of_the_whole_model() -> None:
    whole, (tokens, targets) = prepared(CONFIG), microbatch()
    stages = []
    for cut in all_cuts(STAGES):
        stages.append(build_model(CONFIG, cut=cut))
        stages[-1].load_flat(initial_weights(CONFIG, 3, cut))
    inputs = [tokens]
    for stage in stages[:-1]:
        inputs.append(forward_stage(stage, inputs[-1], tokens))
        assert inputs[-1].shape == (3, CONFIG.context, CONFIG.subspace)
    loss, gradient = finish_microbatch(stages[-1], inputs[-1], targets, 1.0, tokens)
    for stage, given in zip(stages[-2::-1], inputs[-2::-1], strict=True):
        assert gradient is not None and gradient.shape == (3, CONFIG.context, CONFIG.subspace)
        gradient = backward_stage(stage, given, gradient, tokens)
    expected, _ = finish_microbatch(whole, tokens, targets, 1.0)
    assert loss == pytest.approx(expected, rel=1e-6)
    joined = torch.cat([gradient_of(stage) for stage in stages])
    torch.testing.assert_close(joined, gradient_of(whole), rtol=1e-4, atol=1e-7)


def test_stage_without_the_right_tokens_is_of_no_use() -> None:
    stage, (tokens, _) = build_model(CONFIG, cut=all_cuts(STAGES)[1]), microbatch()
    stage.load_flat(initial_weights(CONFIG, 3, stage.cut))
    values = torch.randn(3, CONFIG.context, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="needs the token ids"):
        forward_stage(stage, values)
    assert not torch.allclose(forward_stage(stage, values, tokens), forward_stage(stage, values, tokens.roll(1)))


@pytest.mark.parametrize(("width", "count"), [(32, 8), (100, 99), (768, 96)])
def test_columns_of_the_basis_are_orthogonal_and_of_one_length(width: int, count: int) -> None:
    basis = make_basis(width, count)
    torch.testing.assert_close(basis.T @ basis, torch.eye(count) * width / count, rtol=0, atol=5e-5)


def test_fixed_rows_are_like_random_ones_and_nobody_stores_a_table_of_them() -> None:
    config = CONFIG.model_copy(update={"vocabulary": 5000, "width": 256})
    subspace = Subspace(config, "cpu")
    rows = subspace.fixed_rows(torch.arange(5000))
    assert float(rows.std()) == pytest.approx(ROW_DEVIATION, rel=0.02)
    cosines = torch.nn.functional.normalize(rows[:1000]) @ torch.nn.functional.normalize(rows[-1000:]).T
    assert float(cosines.std()) == pytest.approx(256**-0.5, rel=0.1) and float(cosines.abs().max()) < 0.5
    assert sum(buffer.numel() for buffer in (subspace.codes, subspace.signs)) < 0.03 * rows.numel()
    assert int(torch.linalg.matrix_rank(rows)) == 256, "they span all of the stream"

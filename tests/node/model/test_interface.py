"""What torch and the rest of the node may rely on in a model of any family."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from node.from_manifest import build_program
from node.model import LanguageModel, all_cuts, build_model, has_compiler, initial_weights, model_family, shape_table
from node.model.families import FAMILIES, stage_slice
from node.model.interface import Recompute
from node.model.products import COPY_ELEMENTS, join_rows
from protocol.errors import ManifestError
from protocol.manifest.model import ModelSection
from tests.node.small_run import MANIFEST

torch.set_num_threads(1)
ROOT = Path(__file__).parents[3]
SMALL = ModelSection(vocabulary=32, width=16, layers=2, heads=4, kv_heads=2, hidden=24, context=12)
UNTIED = SMALL.model_copy(update={"tied": False})
WIDE = ModelSection(vocabulary=32, width=256, layers=1, heads=4, hidden=520, context=8)  # rows are shared, not copied
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
MOE = SMALL.model_copy(update={"kind": "qwen3-moe", "experts": 2, "experts_per_token": 2})
NEEDED = {"qwen3-moe": {"experts": 2, "experts_per_token": 2}}  # the keys without which a family has no model
BUILT = [kind for kind in FAMILIES if kind != "custom"]  # the loops of users compute models of that kind


def every_shape_of(kind: str) -> dict[str, ModelSection]:
    """Return models of a family whose matrices are tied and not, and with heads of another width."""
    base = SMALL.model_copy(update={"kind": kind, **NEEDED.get(kind, {})})
    changes: dict[str, dict[str, object]] = {"": {}, " untied": {"tied": False}, " heads": {"head_size": 6}}
    return {kind + name: base.model_copy(update=change) for name, change in changes.items()}


SHAPES = {"wide": WIDE} | {name: config for kind in BUILT for name, config in every_shape_of(kind).items()}
every_shape = pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
every_family = pytest.mark.parametrize("config", [every_shape_of(kind)[kind] for kind in BUILT], ids=BUILT)


def prepared(config: ModelSection, seed: int = 0) -> LanguageModel:
    model = build_model(config)
    model.load_flat(initial_weights(config, seed))
    return model


def loss_of(model: nn.Module, config: ModelSection, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocabulary, (3, config.context + 1), generator=generator)
    loss: Tensor = model(tokens[:, :-1], tokens[:, 1:])
    return loss


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def is_view(tensor: Tensor | None, flat: Tensor, offset: int) -> bool:
    return tensor is not None and tensor.data_ptr() == flat.data_ptr() + 4 * offset and tensor.is_contiguous()


@every_shape
def test_parameters_and_gradients_are_views_of_flat_vectors_in_the_order_of_the_table(config: ModelSection) -> None:
    model, table = prepared(config), shape_table(config)
    flat_gradient = model.attach_gradient()
    backward(loss_of(model, config))
    named = dict(model.named_parameters())
    assert tuple(named) == table.names and not list(model.buffers(recurse=False))
    for (name, parameter), shape, offset in zip(named.items(), table.shapes, table.offsets, strict=True):
        assert parameter.shape == shape and parameter.requires_grad and parameter.is_leaf, name
        assert is_view(parameter, model.flat, offset) and is_view(parameter.grad, flat_gradient, offset), name
    assert model.flat_gradient is flat_gradient
    assert model.state_dict().keys() == set(table.names)


@every_shape
def test_gradients_of_plain_backward_are_gathered(config: ModelSection) -> None:
    plain, attached = prepared(config), prepared(config)
    assert plain.flat_gradient is None
    attached.attach_gradient()
    for model in (plain, attached):
        backward(loss_of(model, config, 0))
        backward(loss_of(model, config, 1))
    assert plain.flat_gradient is not None and attached.flat_gradient is not None
    assert plain.flat_gradient.any() and torch.equal(plain.flat_gradient, attached.flat_gradient)
    plain.zero_grad()
    assert plain.flat_gradient is None
    backward(loss_of(plain, config, 2))
    attached.clear_gradient()
    assert attached.flat_gradient is None
    backward(loss_of(attached, config, 2))
    assert torch.equal(plain.flat_gradient, attached.flat_gradient)


def test_parameters_without_gradient_count_as_zero() -> None:
    model = prepared(UNTIED)
    for parameter in list(model.parameters())[1:]:
        parameter.grad = torch.ones_like(parameter)
    gradient = model.flat_gradient
    size = model.shapes.sizes[0]
    assert gradient is not None and not gradient[:size].any() and bool((gradient[size:] == 1).all())
    model.zero_grad()
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    gradient = model.flat_gradient
    assert gradient is not None and bool((gradient[:size] == 1).all()) and not gradient[size:].any()


def test_torch_optimizers_over_the_parameters_change_the_flat_vector() -> None:
    model, whole = prepared(SMALL), nn.Parameter(initial_weights(SMALL, 0))
    by_parameter = torch.optim.AdamW(model.parameters(), lr=1e-2)
    at_once = torch.optim.AdamW([whole], lr=1e-2)
    for step in range(3):
        by_parameter.zero_grad()
        backward(loss_of(model, SMALL, step))
        whole.grad = model.attach_gradient().clone()
        by_parameter.step()
        at_once.step()
    assert not torch.equal(model.flat, initial_weights(SMALL, 0))
    torch.testing.assert_close(model.flat, whole.detach(), atol=1e-7, rtol=1e-6)


@needs_compiler
@pytest.mark.slow
def test_a_compiled_step_is_an_eager_one_up_to_rounding() -> None:
    config = SMALL.model_copy(update={"layers": 1})
    eager, compiled = prepared(config), prepared(config)
    compiled.compile(dynamic=False)
    losses = []
    for model in (eager, compiled):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model.attach_gradient()
        loss = loss_of(model, config)
        backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert eager.flat_gradient is not None and compiled.flat_gradient is not None
    torch.testing.assert_close(compiled.flat_gradient, eager.flat_gradient, atol=1e-6, rtol=1e-4)
    assert not torch.equal(compiled.flat, initial_weights(config, 0))


def test_parameters_stay_views_when_the_module_is_converted() -> None:
    model = prepared(SMALL)
    backward(loss_of(model, SMALL))
    before = model.attach_gradient().clone()
    assert model.to(torch.float64) is model and model.flat.dtype == torch.float64
    parameters = list(model.parameters())
    assert any(bool(parameter.any()) for parameter in parameters)
    model.flat.zero_()
    assert not any(bool(parameter.any()) for parameter in parameters)
    assert model.flat_gradient is not None and torch.equal(model.flat_gradient.float(), before)


@every_shape
def test_blocks_are_the_table_cut_into_embedding_layers_and_head(config: ModelSection) -> None:
    model, table = prepared(config), shape_table(config)
    assert len(model.blocks) == len(table.blocks) == config.layers + 2
    assert sum(table.blocks, ()) == table.names
    used = [parameters_used(model, block, config) for block in model.blocks]
    for names, block in zip(used, table.blocks, strict=True):
        assert names >= set(block)
    elsewhere = set(table.blocks[0]) if config.tied else set()
    assert used[-1] - set(table.blocks[-1]) == elsewhere, "a tied head uses the embedding, and nothing else is shared"
    assert all(names == set(block) for names, block in zip(used[:-1], table.blocks, strict=False))


def parameters_used(model: LanguageModel, block: Callable[[Tensor], Tensor], config: ModelSection) -> set[str]:
    """Names of the parameters that get a gradient from this block alone."""
    model.clear_gradient()
    is_first = block is model.blocks[0]
    stream = torch.zeros(1, 4, dtype=torch.int64) if is_first else torch.randn(1, 4, config.width)
    backward(block(stream).square().sum())
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


@every_family
def test_running_the_blocks_one_after_the_other_is_the_model(config: ModelSection) -> None:
    model = prepared(config)
    stream = tokens = torch.arange(8).view(2, 4)
    for block in model.blocks:
        stream = block(stream)
    assert torch.equal(stream, model(tokens))


@every_family
def test_stages_one_after_the_other_compute_the_loss_of_the_model(config: ModelSection) -> None:
    config = config.model_copy(update={"tied": False, "balance_loss": 0.0})
    whole, weights = prepared(config), initial_weights(config, 0)
    tokens = torch.randint(config.vocabulary, (3, config.context + 1), generator=torch.Generator().manual_seed(0))
    values = inputs = tokens[:, :-1]
    for cut in all_cuts(2):
        stage = build_model(config, cut=cut)
        stage.load_flat(weights[stage_slice(config, cut)])
        values = stage(values, tokens[:, 1:] if cut.has_head else None, inputs)
    assert values.item() == pytest.approx(loss_of(whole, config).item(), rel=1e-6)


@every_family
def test_no_position_depends_on_a_later_one(config: ModelSection) -> None:
    model, tokens = prepared(config), torch.arange(config.context).view(1, -1)
    changed = tokens.clone()
    changed[0, 7] = 31
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], atol=1e-6, rtol=1e-5)
    assert not torch.equal(before[:, 7:], after[:, 7:])


@every_family
def test_every_parameter_gets_a_gradient_and_a_step_against_it_lowers_the_loss(config: ModelSection) -> None:
    model = prepared(config)
    loss = loss_of(model, config)
    backward(loss)
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    gradient = model.flat_gradient
    assert gradient is not None
    model.load_flat(model.flat - 0.05 * gradient)
    assert loss_of(model, config).item() < loss.item()


@every_family
def test_recomputation_changes_no_bit_of_the_gradient(config: ModelSection) -> None:
    gradients = []
    for kept in get_args(Recompute):
        model = prepared(config)
        model.recompute = kept
        backward(loss_of(model, config))
        assert model.flat_gradient is not None
        gradients.append(model.flat_gradient)
    assert gradients[0].any() and all(torch.equal(gradient, gradients[0]) for gradient in gradients)


@every_family
def test_memory_of_activations_is_less_if_layers_compute_again(config: ModelSection) -> None:
    family = model_family(config)
    kept = [family.kept_bytes(config, recompute) for recompute in ("none", "selective", "full")]
    assert kept == sorted(kept, reverse=True) and kept[-1] > 0


def test_large_neighbours_are_joined_without_a_copy_and_others_with_one() -> None:
    rows = COPY_ELEMENTS // 256
    flat = torch.randn(3 * rows * 256, generator=torch.Generator().manual_seed(0))
    first, second, third = (nn.Parameter(piece.view(rows, 256)) for piece in torch.split(flat, rows * 256))
    joined = join_rows(first, second, third)
    assert joined.data_ptr() == flat.data_ptr() and torch.equal(joined, flat.view(-1, 256))
    for others in ((first, third), (second, first), (first, nn.Parameter(second.detach().clone()))):
        apart = join_rows(*others)
        assert torch.equal(apart, torch.cat(others)) and apart.data_ptr() != flat.data_ptr()
    weights = torch.randn(joined.shape, generator=torch.Generator().manual_seed(1))
    backward((joined * weights).sum())
    for index, matrix in enumerate((first, second, third)):
        assert matrix.grad is not None and torch.equal(matrix.grad, weights[index * rows : (index + 1) * rows])


@pytest.mark.parametrize("use", [shape_table, model_family, build_model])
def test_an_unknown_kind_is_one_line_that_names_the_known_ones(use: Callable[[ModelSection], object]) -> None:
    with pytest.raises(ManifestError, match=r"^model\.kind: .*'mamba'.*: custom, llama, olmo2, qwen3, qwen3-moe$"):
        use(SMALL.model_copy(update={"kind": "mamba"}))


@pytest.mark.parametrize("use", [shape_table, model_family, build_model])
def test_experts_belong_to_kinds_that_have_them(use: Callable[[ModelSection], object]) -> None:
    with pytest.raises(ManifestError, match=r"^model\.experts: models of the kind llama have no experts; remove it"):
        use(MOE.model_copy(update={"kind": "llama"}))
    with pytest.raises(ManifestError, match=r"^model\.experts: models of the kind qwen3-moe have experts; add"):
        use(SMALL.model_copy(update={"kind": "qwen3-moe"}))


def test_a_manifest_of_an_unknown_kind_is_refused_before_anything_is_built() -> None:
    model = MANIFEST.model.model_copy(update={"kind": "mamba"})
    with pytest.raises(ManifestError, match=r"model\.kind"):
        build_program(MANIFEST.model_copy(update={"model": model}))


def test_families_are_named_by_their_kind_and_the_default_exists() -> None:
    assert all(family.kind == kind for kind, family in FAMILIES.items())
    assert ModelSection.model_fields["kind"].default in FAMILIES


def test_no_family_is_named_outside_of_the_models_package() -> None:
    """All other code meets a model through `node.model`: a new family is one new file and one entry."""
    titles = re.compile("|".join(family.title for family in FAMILIES.values()))
    packages = ("protocol", "optim", "node", "benchmarks")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    naming = {path.relative_to(ROOT).as_posix() for path in files if titles.search(path.read_text(encoding="utf-8"))}
    assert "node/model/decoders/olmo2.py" in naming, "the control"
    assert {name for name in naming if not name.startswith("node/model/")} == set()

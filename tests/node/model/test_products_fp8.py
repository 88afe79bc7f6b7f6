"""Products in fp8: as exact as the types allow, for each size of tensor, and good enough to train with."""

import math
from statistics import fmean

import pytest
import torch
from torch import Tensor

from node.from_manifest import build_program
from node.model import LanguageModel, build_model, initial_weights, products
from node.model.products import multiply
from node.options import TrainerOptions
from node.trainer.devices.device import device_class, require_fp8
from node.trainer.inner_step import InnerOptimizer, accumulate_gradient
from protocol.errors import DeviceError
from protocol.manifest.model import ModelSection
from protocol.manifest.sections import TrainSection
from tests.node.small_run import MANIFEST

CPU = torch.device("cpu")
SHAPE = ModelSection(vocabulary=32, width=32, layers=2, heads=2, hidden=64, context=16)
EXPERTS = {"kind": "qwen3-moe", "experts": 4, "experts_per_token": 1, "balance_loss": 0.0}
TRAIN = TrainSection(batch_tokens=128, learning_rate=1e-2, warmup_steps=0)
NEAR = 0.07  # e4m3 rounds to a sixteenth at most, e5m2 to an eighth, and on average to less
STEPS, LAST = 50, 10


def normal(*sizes: int, seed: int = 0, length: float = 1.0) -> Tensor:
    return length * torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def relative(found: Tensor, exact: Tensor) -> float:
    return float(torch.linalg.vector_norm(found - exact) / torch.linalg.vector_norm(exact))


def errors(length: float, rows: tuple[int, ...] = (3, 7)) -> list[float]:
    """Return the relative errors of a product and of both gradients, for values and gradients of that length."""
    results = []
    for in_fp8 in (True, False):
        values = normal(*rows, 64, seed=1, length=length).requires_grad_()
        weight = normal(48, 64, seed=2, length=length).requires_grad_()
        product = multiply(values, weight, in_fp8)
        torch.autograd.backward(product, normal(*rows, 48, seed=3, length=length))
        assert values.grad is not None and weight.grad is not None
        assert (product.dtype, values.grad.dtype, weight.grad.dtype) == (torch.float32,) * 3
        results.append((product.detach(), values.grad, weight.grad))
    return [relative(found, exact) for found, exact in zip(*results, strict=True)]


@pytest.mark.parametrize("length", [1e-6, 1.0, 1e4])
def test_products_and_gradients_are_near_those_in_fp32(length: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with a scale of one, small values vanish and large ones are cut off."""
    assert all(0 < error < NEAR for error in errors(length)), errors(length)
    real = products._scale

    def unscaled(tensor: Tensor, dtype: torch.dtype) -> products.Scaled:
        largest = torch.finfo(dtype).max
        return tensor.clamp(-largest, largest).to(dtype), torch.ones(())

    monkeypatch.setattr(products, "_scale", unscaled)
    assert length == 1.0 or max(errors(length)) > 0.5
    monkeypatch.setattr(products, "_scale", real)


@pytest.mark.parametrize("rows", [(1,), (16,), (2, 17)])
def test_any_number_of_rows_is_multiplied(rows: tuple[int, ...]) -> None:
    assert all(0 < error < NEAR for error in errors(1.0, rows)), errors(1.0, rows)


def test_under_autocast_the_product_is_bf16() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert multiply(normal(4, 32), normal(16, 32), True).dtype == torch.bfloat16


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_not_hidden(bad: float) -> None:
    values = normal(4, 32)
    values[1, 2] = bad
    assert not multiply(values, normal(16, 32), True).isfinite().all()
    assert multiply(torch.zeros(4, 32), normal(16, 32), True).eq(0).all()


def losses(model: LanguageModel, steps: int) -> list[float]:
    """Return the loss of each step on a text in which each token follows from the one before."""
    model.load_flat(initial_weights(model.config, 0))
    optimizer, found = InnerOptimizer(model, TRAIN, build_program(MANIFEST).method.inner), []
    for step in range(steps):
        starts = torch.randint(32, (8, 1), generator=torch.Generator().manual_seed(step))
        windows = (starts * 5 ** torch.arange(17) + 3 * torch.arange(17)) % 32
        found.append(accumulate_gradient(model, windows, 4))
        optimizer.step(step)
        optimizer.clear_gradient()
    return found


def gradient(shape: ModelSection, in_fp8: bool) -> Tensor:
    model = build_model(shape)
    if in_fp8:
        model.multiply_in_fp8()
    model.load_flat(initial_weights(shape, 0))
    accumulate_gradient(model, torch.randint(32, (4, 17), generator=torch.Generator().manual_seed(1)), 4)
    assert model.flat_gradient is not None
    return model.flat_gradient


@pytest.mark.parametrize("values", [{}, EXPERTS, {"kind": "qwen3", "tied": False}], ids=["llama", "experts", "qwen3"])
def test_gradients_of_models_are_near_those_in_fp32(values: dict[str, object]) -> None:
    shape = SHAPE.model_copy(update=values)
    assert 1e-3 < relative(gradient(shape, True), gradient(shape, False)) < 2 * NEAR


@pytest.mark.slow
def test_a_model_learns_almost_as_fast_as_in_fp32() -> None:
    plain, in_fp8 = build_model(SHAPE), build_model(SHAPE)
    in_fp8.multiply_in_fp8()
    exact, found = losses(plain, STEPS), losses(in_fp8, STEPS)
    assert fmean(exact[-LAST:]) < exact[0] - 2.0, "the text can be learnt"
    assert fmean(found[-LAST:]) < fmean(exact[-LAST:]) + 0.25, (exact[-LAST:], found[-LAST:])


def test_what_cannot_is_refused_with_what_to_do() -> None:
    with pytest.raises(DeviceError, match=r"^--fp8 needs an NVIDIA card from 2022 on, and cpu is none; leave it out$"):
        require_fp8(MANIFEST, (CPU,))
    odd = build_model(SHAPE.model_copy(update={"hidden": 40}))
    with pytest.raises(DeviceError, match=r"^--fp8 needs multiples of 16, and the model's hidden is 40; leave it out$"):
        odd.multiply_in_fp8()
    assert device_class(CPU, options=TrainerOptions(fp8=True)) != device_class(CPU), "no auditor repeats it"

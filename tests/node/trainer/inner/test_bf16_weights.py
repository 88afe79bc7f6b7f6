"""Weights in bf16: stochastic rounding keeps small updates, which rounding to the nearest loses."""

from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from node.from_manifest import build_program
from node.model import LanguageModel, build_model, initial_weights, interface
from node.model.interface import StochasticRounding
from node.options import TrainerOptions
from node.trainer import inner_step
from node.trainer.devices.device import device_class, require_bf16_weights
from node.trainer.inner_step import InnerOptimizer, accumulate_gradient
from node.trainer.live import CopiedVectors
from optim.inner.adamw import AdamW
from optim.inner.base import WEIGHTS, InnerUpdateRule
from optim.inner.eight_bit import EightBitAdamW
from protocol.errors import DeviceError
from protocol.manifest.model import ModelSection
from protocol.manifest.sections import TrainSection
from tests.node.small_run import MANIFEST

CPU = torch.device("cpu")
SHAPE = ModelSection(vocabulary=32, width=32, layers=2, heads=4, hidden=64, context=16)
STEPS, RATE = 100, 1e-5
RULES = (AdamW(), EightBitAdamW())
TRAIN = TrainSection(batch_tokens=64, learning_rate=RATE, warmup_steps=0, weight_decay=0.0)


class NearestRounding(StochasticRounding):
    """The control."""

    def copy(self, values: Tensor, out: Tensor) -> None:
        out.copy_(values)


def prepared(rounding: StochasticRounding | None) -> LanguageModel:
    model = build_model(SHAPE)
    if rounding is not None:
        model.keep_bf16()
        model.rounding = rounding
    model.load_flat(initial_weights(SHAPE, 0))
    return model


def test_mean_of_rounded_values_is_right_and_values_of_bf16_keep_their_bits() -> None:
    values = torch.full((200_000,), 1 + 2.0**-10)
    found = torch.empty_like(values, dtype=torch.bfloat16)
    StochasticRounding(CPU, seed=1).copy(values, found)
    assert set(found.tolist()) == {1.0, 1 + 2.0**-7}
    assert found.double().mean().item() == pytest.approx(1 + 2.0**-10, abs=3e-5)
    assert set(values.bfloat16().tolist()) == {1.0}, "control: to the nearest"
    exact = torch.randn(1000).bfloat16()
    again = torch.empty_like(exact)
    StochasticRounding(CPU, seed=2).copy(exact.float(), again)
    assert torch.equal(again, exact)


def moved(model: LanguageModel, inner: InnerUpdateRule) -> float:
    """Return how far weights of about 0.02 move on average, under a gradient that never changes."""
    model.load_flat(torch.full((model.flat.numel(),), 0.02))
    before, optimizer = model.flat.double(), InnerOptimizer(model, TRAIN, inner)
    for step in range(STEPS):
        model.attach_gradient().fill_(-1e-4)
        optimizer.step(step)
    return float((model.flat.double() - before).mean())


@pytest.mark.parametrize("inner", RULES)
def test_updates_of_less_than_half_a_bit_are_not_lost(inner: InnerUpdateRule) -> None:
    wanted = moved(prepared(None), inner)
    assert wanted == pytest.approx(STEPS * RATE, rel=0.05)
    assert moved(prepared(StochasticRounding(CPU, seed=3)), inner) == pytest.approx(wanted, rel=0.05)
    assert moved(prepared(NearestRounding(CPU)), inner) == 0, "control"


@pytest.mark.parametrize("inner", RULES)
def test_training_reaches_the_loss_of_fp32_weights(monkeypatch: pytest.MonkeyPatch, inner: InnerUpdateRule) -> None:
    monkeypatch.setattr(interface, "CHUNK_VALUES", {"cpu": 1})
    monkeypatch.setattr(interface, "MIN_CHUNK_TOKENS", 20)
    train = TRAIN.model_copy(update={"learning_rate": 3e-3})
    windows = torch.arange(17).repeat(4, 1) + torch.arange(4)[:, None]

    def context(_: torch.device) -> AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16)

    monkeypatch.setattr(inner_step, "autocast_context", context)

    def losses(model: LanguageModel) -> list[float]:
        optimizer, found = InnerOptimizer(model, train, inner), []
        for step in range(40):
            found.append(accumulate_gradient(model, windows, 2))
            optimizer.step(step)
            optimizer.clear_gradient()
        return found

    wanted, found = losses(prepared(None)), losses(prepared(StochasticRounding(CPU, seed=4)))
    assert found[0] == pytest.approx(wanted[0], rel=0.01)
    assert found[-1] < 0.5 * found[0] and found[-1] == pytest.approx(wanted[-1], rel=0.15)


def test_shared_memory_keeps_fp32_and_gives_the_same_bits_back() -> None:
    model = prepared(StochasticRounding(CPU, seed=5))
    optimizer = InnerOptimizer(model, TRAIN, AdamW())
    live, kept = CopiedVectors(model, optimizer), model.flat.clone()
    shared = {WEIGHTS: torch.zeros(model.flat.numel()), **{name: v.clone() for name, v in optimizer.vectors.items()}}
    live.save(shared)
    model.flat.zero_()
    live.load(shared)
    assert torch.equal(model.flat, kept) and shared[WEIGHTS].dtype == torch.float32
    assert model.attach_gradient().dtype == torch.bfloat16
    assert all(vector.dtype == torch.float32 for vector in optimizer.vectors.values())


def test_what_cannot_train_so_is_refused_on_one_line() -> None:
    with pytest.raises(DeviceError, match=r"^--weights bf16 is for a card, .*; leave it out$"):
        require_bf16_weights(MANIFEST, build_program(MANIFEST), [CPU])
    assert device_class(CPU, options=TrainerOptions(weights="bf16")) != device_class(CPU), "no auditor repeats it"

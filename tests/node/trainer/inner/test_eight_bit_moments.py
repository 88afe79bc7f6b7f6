"""A model learns as much with 8-bit moments as with moments of fp32."""

import pytest
import torch
from torch import Tensor

from node.model import build_model, initial_weights
from node.trainer.inner_step import InnerOptimizer, accumulate_gradient, validation_loss
from optim.inner.adamw import AdamW
from optim.inner.base import InnerUpdateRule
from optim.inner.eight_bit import EightBitAdamW
from protocol.manifest.model import ModelSection
from protocol.manifest.sections import TrainSection

pytestmark = pytest.mark.slow

MODEL = ModelSection(vocabulary=32, width=32, layers=2, heads=2, hidden=64, context=24)
TRAIN = TrainSection(batch_tokens=384, learning_rate=5e-3, warmup_steps=10, decay_steps=200)
STEPS = 200


class LinearSecondMoment(EightBitAdamW):
    """A second moment in 16 equal steps, by which small values become zero."""

    _step_by_kernel = EightBitAdamW._step_by_torch

    @staticmethod
    def encode_second(values: Tensor, noise: Tensor | None) -> Tensor:
        return (15 * values).round().to(torch.uint8)

    @staticmethod
    def decode_second(codes: Tensor) -> Tensor:
        return codes.float() / 15


def texts(seed: int, count: int) -> Tensor:
    """Return texts of a random chain, in which five tokens may follow each token."""
    table = torch.randint(32, (32, 5), generator=torch.Generator().manual_seed(7))
    choices = torch.Generator().manual_seed(seed)
    rows = [torch.randint(32, (count,), generator=choices)]
    for _ in range(MODEL.context):
        rows.append(table[rows[-1], torch.randint(5, (count,), generator=choices)])
    return torch.stack(rows, 1)


def loss_after_training(inner: InnerUpdateRule) -> float:
    model = build_model(MODEL)
    model.load_flat(initial_weights(MODEL, 0))
    optimizer = InnerOptimizer(model, TRAIN, inner)
    for step in range(STEPS):
        accumulate_gradient(model, texts(step, 16), 16)
        optimizer.step(step)
        optimizer.clear_gradient()
    return validation_loss(model, model.flat, [texts(10_000, 128)])[0]


def test_loss_is_within_a_hundredth_of_that_with_fp32_moments() -> None:
    """The control has a linear code for the second moment."""
    exact = loss_after_training(AdamW())
    assert exact < 2.0, "the model has learned nothing to compare"
    assert loss_after_training(EightBitAdamW()) < 1.01 * exact
    assert loss_after_training(LinearSecondMoment(rounding="nearest")) > 1.2 * exact

"""The inner optimizer against its formula and against torch's AdamW over separate parameters."""

import math

import pytest
import torch

from node.model import Llama, initial_weights
from node.trainer.inner import InnerOptimizer, learning_rate, matrix_runs
from protocol.manifest import Model, Train

torch.set_num_threads(1)
MODEL = Model(vocabulary=32, width=16, layers=2, heads=4, hidden=24, context=12)
TRAIN = Train(batch_tokens=24, learning_rate=1e-2, clip=0.5)


def prepared(train: Train = TRAIN) -> tuple[Llama, InnerOptimizer]:
    model = Llama(MODEL)
    model.load_flat(initial_weights(MODEL, 0))
    return model, InnerOptimizer(model, train)


def set_gradient(model: Llama, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    model.flat.grad = torch.randn(model.flat.shape, generator=generator) * scale


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 1e-2 / 5),
        (3, 1e-2 * 4 / 5 * (0.1 + 0.9 * (1 + math.cos(math.pi * 3 / 100)) / 2)),
        (50, 1e-2 * 0.55),
        (100, 1e-3),
        (5000, 1e-3),
    ],
)
def test_learning_rate(step: int, expected: float) -> None:
    train = Train(batch_tokens=24, learning_rate=1e-2, warmup_steps=4, decay_steps=100, final_share=0.1)
    assert learning_rate(train, step) == pytest.approx(expected)


def test_learning_rate_without_warm_up_and_decay_is_constant() -> None:
    assert {learning_rate(TRAIN, step) for step in (0, 1, 10_000)} == {1e-2}


def test_runs_cover_the_matrices_and_nothing_else() -> None:
    model, _ = prepared()
    covered = torch.zeros(model.shapes.numel, dtype=torch.bool)
    for start, stop in matrix_runs(model.shapes):
        assert not covered[start:stop].any()
        covered[start:stop] = True
    for name, view in model.shapes.views(covered).items():
        assert bool(view.all()) == bool(view.any()) == ("norm" not in name)


def test_steps_equal_torch_over_separate_parameters() -> None:
    model, optimizer = prepared()
    parameters = {name: view.clone().requires_grad_() for name, view in model.shapes.views(model.flat.detach()).items()}
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in parameters.values() if p.ndim == 2], "weight_decay": TRAIN.weight_decay},
            {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=TRAIN.learning_rate,
        betas=(TRAIN.beta1, TRAIN.beta2),
    )
    for step in range(5):
        set_gradient(model, step)
        assert model.flat.grad is not None
        for name, gradient in model.shapes.views(model.flat.grad.clone()).items():
            parameters[name].grad = gradient
        torch.nn.utils.clip_grad_norm_(parameters.values(), TRAIN.clip)
        reference.step()
        assert optimizer.step(step)
    for name, view in model.shapes.views(model.flat.detach()).items():
        torch.testing.assert_close(view, parameters[name].detach(), atol=1e-6, rtol=1e-5)


def test_moments_carried_over_go_on_to_the_bit() -> None:
    model, optimizer = prepared()
    other, second = prepared()
    for step in range(3):
        set_gradient(model, step)
        optimizer.step(step)
    other.load_flat(model.flat.detach())
    second.first_moment.copy_(optimizer.first_moment)
    second.second_moment.copy_(optimizer.second_moment)
    for each, stepped in ((model, optimizer), (other, second)):
        set_gradient(each, 99)
        stepped.step(3)
    assert torch.equal(model.flat, other.flat)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    model, optimizer = prepared()
    before = model.flat.detach().clone()
    set_gradient(model, 0)
    assert model.flat.grad is not None
    model.flat.grad[5] = bad
    assert not optimizer.step(0)
    assert torch.equal(model.flat.detach(), before)
    assert not optimizer.first_moment.any()


def test_a_step_without_gradient_is_a_mistake() -> None:
    _, optimizer = prepared()
    with pytest.raises(ValueError, match="backward"):
        optimizer.step(0)

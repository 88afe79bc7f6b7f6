import torch

from optim.inner.base import GRADIENT_SUM, InnerStep
from optim.inner.gradient_accumulation import MOMENTUM, GradientAccumulator, LookaheadAccumulator

STEP = InnerStep(3, 0.01, 0.9, 0.95, 0.1, ((0, 4),))


def test_gradients_are_summed_and_weights_do_not_move() -> None:
    inner, weights = LookaheadAccumulator(beta=0.5), torch.ones(4)
    vectors = {name: torch.zeros(4) for name in inner.vectors}
    for scale in (1.0, 2.0):
        inner.step(weights, torch.full((4,), scale), vectors, STEP)
    assert torch.equal(weights, torch.ones(4))
    assert torch.equal(vectors[GRADIENT_SUM], torch.full((4,), 3.0))
    assert torch.equal(vectors[MOMENTUM], torch.full((4,), 2.5))


def test_gradient_is_computed_where_the_sign_of_the_momentum_leads() -> None:
    inner, weights = LookaheadAccumulator(reach=0.5), torch.zeros(3)
    momentum = torch.tensor([1e-9, -3.0, 0.0])
    ahead = inner.lookahead_weights(weights, {MOMENTUM: momentum}, STEP)
    assert ahead is not None and torch.allclose(ahead, torch.tensor([-0.005, 0.005, 0.0]))
    assert not weights.any()
    assert GradientAccumulator().lookahead_weights(weights, {}, STEP) is None

"""Momentum for gradients that arrive `delay` steps late, as in a pipeline that never drains.

There, stage s of P sees its gradients 2 (P - s) steps late (arXiv 2003.11666). All rules start from v <- mu * v + g;
theta <- theta - rate * v.

With delay = 1, spike compensation and weight prediction are the two forms of Nesterov's momentum; with 0 they are plain
momentum. They need a larger learning rate than Adam: `boost` times the run's.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from optim.inner.base import InnerStep, InnerUpdateRule
from optim.options import STRICT

VELOCITY = "velocity"
TINY = 1e-30


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _MomentumRule(InnerUpdateRule):
    vectors: ClassVar[tuple[str, ...]] = (VELOCITY,)
    is_elementwise: ClassVar[bool] = True

    momentum: float = Field(default=0.9, ge=0, lt=1)
    boost: float = Field(default=10.0, gt=0, le=1000, description="factor on the run's learning rate")

    def step(self, weights: Tensor, gradient: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> None:
        step.decay_weights(weights)
        velocity = vectors[VELOCITY]
        self._update_velocity(velocity, gradient, step)
        weights.sub_(self._direction(velocity, gradient), alpha=self._rate(step))

    def _rate(self, step: InnerStep) -> float:
        return step.rate * self.boost

    def _update_velocity(self, velocity: Tensor, gradient: Tensor, step: InnerStep) -> None:
        velocity.mul_(self.momentum).add_(gradient)

    def _direction(self, velocity: Tensor, gradient: Tensor) -> Tensor:
        return velocity


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AdaptiveBraking(_MomentumRule):
    """Momentum in which a gradient along the velocity counts less, and one against it more (arXiv 2007.01397).

        a = 1 - rho * <g, v> / (|g| |v|) for each tensor;  v <- mu * v + a * g;  theta <- theta - rate * v

    rho = 0 is plain momentum. With rho = 1 a noiseless gradient along the velocity counts nothing, and training stops.
    """

    kind: ClassVar[str] = "adaptive-braking"
    is_elementwise: ClassVar[bool] = False
    is_per_tensor: ClassVar[bool] = True

    rho: float = Field(default=2.0, ge=0, le=10)

    def _update_velocity(self, velocity: Tensor, gradient: Tensor, step: InnerStep) -> None:
        for start, stop in step.tensor_spans or ((0, velocity.numel()),):
            fresh, course = gradient[start:stop], velocity[start:stop]
            product = torch.linalg.vector_norm(fresh) * torch.linalg.vector_norm(course)
            fresh.mul_(1 - self.rho * torch.dot(fresh, course) / product.clamp(min=TINY))
        velocity.mul_(self.momentum).add_(gradient)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SpikeCompensation(_MomentumRule):
    """A late gradient contributes at once what it would have contributed in the D steps it missed (arXiv 2003.11666).

    v <- mu * v + g;  theta <- theta - rate * (mu^D * v + (1 - mu^D) / (1 - mu) * g),  D = `delay`
    """

    kind: ClassVar[str] = "spike-compensation"

    delay: int = Field(default=1, ge=0, le=1000, description="steps by which gradients are late")

    def _direction(self, velocity: Tensor, gradient: Tensor) -> Tensor:
        left = self.momentum**self.delay
        return (velocity * left).add_(gradient, alpha=(1 - left) / (1 - self.momentum))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WeightPrediction(_MomentumRule):
    """The gradient is computed where the velocity will lead until it arrives (arXiv 2003.11666).

    g at theta - rate * D * v, D = `delay`;  v <- mu * v + g;  theta <- theta - rate * v
    """

    kind: ClassVar[str] = "weight-prediction"
    looks_ahead: ClassVar[bool] = True

    delay: int = Field(default=1, ge=0, le=1000, description="steps by which gradients are late")

    def lookahead_weights(self, weights: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> Tensor | None:
        if self.delay == 0:
            return None
        return weights.sub(vectors[VELOCITY], alpha=self._rate(step) * self.delay)

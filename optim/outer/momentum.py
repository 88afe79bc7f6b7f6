"""Outer optimizers that use merged progress as a gradient: without momentum, with it, and with it for late progress."""

from abc import abstractmethod
from typing import ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.options import STRICT
from optim.outer.base import OuterOptimizer, OuterStep, Slots, tensor_norm, tensor_slabs


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _ScalableOptimizer(OuterOptimizer):
    """An optimizer that can scale its step by the weight of the round (optim.aggregation.step_scaling)."""

    is_elementwise: ClassVar[bool] = True

    shorten: bool = Field(default=False, description="scale the step of a round of less weight than usual")

    @property
    def is_scaled_by_weight(self) -> bool:
        return self.shorten


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sgd(_ScalableOptimizer):
    """phi <- phi - eta * delta. With eta = 1 and a mean this is plain parameter averaging (arXiv 1602.05629)."""

    kind: ClassVar[str] = "sgd"

    learning_rate: float = Field(default=1.0, gt=0, le=10)

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, outer_step: OuterStep) -> None:
        for part in tensor_slabs(anchor):
            anchor[part] -= delta[part] * self.learning_rate

    @property
    def linear_rate(self) -> float:
        return self.learning_rate


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _MomentumOptimizer(_ScalableOptimizer):
    """m <- mu * m + delta; subclasses compute the step from m and delta."""

    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    learning_rate: float = Field(default=0.7, gt=0, le=10)
    momentum: float = Field(default=0.9, ge=0, lt=1)

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, outer_step: OuterStep) -> None:
        for part in tensor_slabs(anchor):
            momentum = slots["momentum"][part]
            momentum *= self.momentum
            momentum += delta[part]
            step = self._step(momentum, delta[part])
            step *= self.learning_rate
            anchor[part] -= step

    @abstractmethod
    def _step(self, momentum: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Return the step before it is scaled by eta, as a new tensor."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Nesterov(_MomentumOptimizer):
    """Nesterov's momentum as in torch.optim.SGD(nesterov=True), the outer optimizer of DiLoCo (arXiv 2311.08105).

    m <- mu * m + delta;  phi <- phi - eta * (delta + mu * m)
    """

    kind: ClassVar[str] = "nesterov"

    def _step(self, momentum: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        step = momentum * self.momentum
        step += delta
        return step


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HeavyBall(_MomentumOptimizer):
    """Polyak's momentum as in torch.optim.SGD(nesterov=False).

    m <- mu * m + delta;  phi <- phi - eta * m
    """

    kind: ClassVar[str] = "heavy-ball"

    def _step(self, momentum: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        return momentum.clone()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DelayedNesterov(OuterOptimizer):
    """Nesterov's momentum for progress that arrives from a few members at a time (arXiv 2401.09135, with its c = 0).

    Momentum diverges when it is applied to every stale update, so it is applied only to every N-th, N = `period`, using
    the mean of the last N:

        every N-th update:  m <- mu * m + (sum of the N) / N;  phi <- phi - eta * (delta / N + mu * m)
        the others:         phi <- phi - eta * delta / N

    N such updates equal one Nesterov step on their mean. (The paper's public notebook has a different rule.)
    """

    kind: ClassVar[str] = "delayed-nesterov"
    counts_steps: ClassVar[bool] = True
    is_elementwise: ClassVar[bool] = True
    slots: ClassVar[tuple[str, ...]] = ("gathered", "momentum")

    learning_rate: float = Field(default=0.7, gt=0, le=10)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    period: int = Field(default=4, ge=1, le=1000)

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, outer_step: OuterStep) -> None:
        is_period_end = (outer_step.count + 1) % self.period == 0
        for part in tensor_slabs(anchor):
            gathered, step = slots["gathered"][part], delta[part] / self.period
            gathered += delta[part]
            if is_period_end:
                momentum = slots["momentum"][part]
                momentum *= self.momentum
                momentum += gathered / self.period
                gathered.zero_()
                step += momentum * self.momentum
            step *= self.learning_rate
            anchor[part] -= step


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StalenessPenalised(OuterOptimizer):
    """CO2's outer step on progress that is one round late (arXiv 2401.16265).

        m <- mu * m + delta / L;  m <- clamp(m, -c', c');  phi <- phi - eta * m
        L = 1 + |x_t - x_(t-1)| / |a|,  a = the running mean of |x_t - x_(t-1)| by coordinate

    where c' is `clip` times the remaining fraction of the run's learning rate, because progress shrinks with it.

    The gap x_t - x_(t-1) = -eta * m is the movement of the anchor since the progress was measured from it. The paper
    leaves open how the gap is scaled; here all peers know `a`, an average over the first rounds and later over about
    the last 1 / `rate`. (In the public code the clip has no effect and L is a constant, 1 by default: `penalty` =
    false.)
    """

    kind: ClassVar[str] = "staleness-penalised"
    counts_steps: ClassVar[bool] = True
    slots: ClassVar[tuple[str, ...]] = ("momentum", "movement")
    positive_slots: ClassVar[tuple[str, ...]] = ("movement",)

    learning_rate: float = Field(default=1.0, gt=0, le=10)
    momentum: float = Field(default=0.5, ge=0, lt=1)
    clip: float = Field(default=0.1, gt=0, description="bound of m in every coordinate")
    penalty: bool = True
    rate: float = Field(default=0.1, gt=0, le=1, description="rate of the running mean")

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, outer_step: OuterStep) -> None:
        penalty = self._update_penalty(slots, outer_step) if self.penalty else 1.0
        limit = self.clip * outer_step.rate_decay
        for part in tensor_slabs(anchor):
            momentum = slots["momentum"][part]
            momentum *= self.momentum
            momentum += delta[part] / penalty
            momentum.clamp_(-limit, limit)
            anchor[part] -= momentum * self.learning_rate

    def _update_penalty(self, slots: Slots, outer_step: OuterStep) -> float:
        """Update `a` and return L, both in units of eta."""
        momentum, movement = slots["momentum"], slots["movement"]
        weight = max(self.rate, 1 / max(1, outer_step.count))
        for part in tensor_slabs(momentum):
            movement[part] += (momentum[part].abs() - movement[part]) * weight
        mean = tensor_norm(movement)
        return 1 + tensor_norm(momentum) / mean if mean else 1.0

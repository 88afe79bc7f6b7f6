"""Outer optimizers that replace the inner optimizer: their rate is a learning rate and decays with the run's."""

import math
from typing import ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.options import STRICT
from optim.outer.base import EPSILON, OuterOptimizer, OuterStep, Slots, decay_weights, tensor_norm, tensor_slabs


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sign(OuterOptimizer):
    """Sign descent (arXiv 1802.04434; DeMo, arXiv 2411.19870).

        phi <- phi * (1 - eta' * weight_decay)      matrices only
        phi <- phi - eta' * sign(delta),            sign(0) = 0

    where eta' is eta times the remaining fraction of the run's learning rate. Each weight moves by eta' or not at all,
    whatever the size of delta, so eta belongs near an inner learning rate.
    """

    kind: ClassVar[str] = "sign"

    learning_rate: float = Field(default=0.001, gt=0, le=10)
    weight_decay: float = Field(default=0.0, ge=0, le=1)

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, outer_step: OuterStep) -> None:
        rate = self.learning_rate * outer_step.rate_decay
        decay_weights(anchor, outer_step, rate * self.weight_decay)
        for part in tensor_slabs(anchor):
            anchor[part] -= torch.sign(delta[part]) * rate


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Adam(OuterOptimizer):
    """AdamW (arXiv 1711.05101) on the merged gradient; used after every step it is data-parallel training.

        g <- delta * min(1, clip / |delta|)
        m <- beta1 * m + (1 - beta1) * g;  v <- beta2 * v + (1 - beta2) * g^2
        phi <- phi * (1 - eta' * weight_decay)      matrices only
        phi <- phi - eta' * m' / (sqrt(v') + eps)

    where x' = x / (1 - beta^(round + 1)) and eta' is eta times the remaining fraction of the run's learning rate.
    """

    kind: ClassVar[str] = "adam"
    counts_steps: ClassVar[bool] = True
    slots: ClassVar[tuple[str, ...]] = ("first_moment", "second_moment")
    positive_slots: ClassVar[tuple[str, ...]] = ("second_moment",)

    learning_rate: float = Field(default=0.003, gt=0, le=10)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.1, ge=0, le=1)
    clip: float = Field(default=1.0, gt=0)

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, outer_step: OuterStep) -> None:
        rate, count = self.learning_rate * outer_step.rate_decay, outer_step.count + 1
        size = tensor_norm(delta)
        shrink = min(1.0, self.clip / size) if size else 1.0
        decay_weights(anchor, outer_step, rate * self.weight_decay)
        scale = math.sqrt(1 - self.beta2**count)
        for part in tensor_slabs(anchor):
            first, second, gradient = slots["first_moment"][part], slots["second_moment"][part], delta[part] * shrink
            first *= self.beta1
            first += gradient * (1 - self.beta1)
            second *= self.beta2
            second += gradient * gradient * (1 - self.beta2)
            spread = torch.sqrt(second)
            spread /= scale
            spread += EPSILON
            anchor[part] -= first / spread * (rate / (1 - self.beta1**count))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FrozenAdam(OuterOptimizer):
    """1-bit Adam (arXiv 2102.02888): the merged contribution is the momentum m' itself.

    In the first `warm_rounds` rounds this is Adam, which recovers the mean gradient from m' to learn v. Afterwards v is
    frozen, so that m' may be sent as one bit per value.

        g = (m' - beta1 * m) / (1 - beta1);  v <- beta2 * v + (1 - beta2) * g^2        while warm
        phi <- phi * (1 - eta' * weight_decay)                                         matrices only
        m <- m';  phi <- phi - eta' * (m / (1 - beta1^n)) / (sqrt(v / (1 - beta2^w)) + eps)

    where n = round + 1, w = min(n, warm_rounds) and eta' is eta times the remaining fraction of the run's learning
    rate.

    A weight that never had a gradient (v = 0) does not move: one bit decodes to at least the scale of its block, and
    divided by eps that would be a huge step. For weights that hardly had any gradient, v is raised to `floor` * mean(v)
    when it freezes (0 in the paper).
    """

    kind: ClassVar[str] = "frozen-adam"
    counts_steps: ClassVar[bool] = True
    slots: ClassVar[tuple[str, ...]] = ("first_moment", "second_moment")
    positive_slots: ClassVar[tuple[str, ...]] = ("second_moment",)
    signals: ClassVar[tuple[str, ...]] = ("momentum",)

    learning_rate: float = Field(default=0.003, gt=0, le=10)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.1, ge=0, le=1)
    warm_rounds: int = Field(default=100, ge=1)
    floor: float = Field(default=0.0, ge=0, le=1)

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, outer_step: OuterStep) -> None:
        rate, count = self.learning_rate * outer_step.rate_decay, outer_step.count + 1
        decay_weights(anchor, outer_step, rate * self.weight_decay)
        if outer_step.count == self.warm_rounds:
            self._raise_to_floor(slots["second_moment"])
        scale = math.sqrt(1 - self.beta2 ** min(count, self.warm_rounds))
        for part in tensor_slabs(anchor):
            first, second = slots["first_moment"][part], slots["second_moment"][part]
            if outer_step.count < self.warm_rounds:
                self._update_second_moment(first, second, delta[part])
            first.copy_(delta[part])
            spread = torch.sqrt(second)
            spread /= scale
            spread += EPSILON
            step = first / spread * (rate / (1 - self.beta1**count))
            anchor[part] -= torch.where(second > 0, step, 0.0)

    def _update_second_moment(self, first: torch.Tensor, second: torch.Tensor, merged: torch.Tensor) -> None:
        gradient = merged - first * self.beta1
        gradient /= 1 - self.beta1
        second *= self.beta2
        second += gradient * gradient * (1 - self.beta2)

    def _raise_to_floor(self, second: torch.Tensor) -> None:
        mean = tensor_norm(torch.sqrt(second)) ** 2 / second.numel()
        second.clamp_(min=self.floor * mean)

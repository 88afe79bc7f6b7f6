"""How the anchor moves by the aggregated pseudo-gradient.

Every peer applies the same update and must hold the same bits afterwards. Therefore each line is one elementwise
operation with one rounding: a fused `add(x, alpha=...)` is a fused multiply-add on some processors and not on others,
and at the ends of a vector not even on those.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.layout import Span, within
from optim.parts import STRICT
from optim.vectors import norm

EPSILON = 1e-8
SLAB = 1 << 18  # values whose temporaries stay in the cache


Slots = Mapping[str, torch.Tensor]


@plain_dataclass(frozen=True)
class Moment:
    """`step`: local steps of a peer before this round's; `decay`: the share of the run's learning rate that is left at
    that step, for updates that take an optimizer's place; `matrices`: where they stand, which alone are decayed."""

    round: int = 0
    step: int = 0
    decay: float = 1.0
    matrices: tuple[Span, ...] = ()

    def within(self, start: int, stop: int) -> "Moment":
        """Of that span of the model."""
        return replace(self, matrices=within(self.matrices, start, stop))


class Update(ABC):
    """The outer optimizer. `slots` names its state vectors, each flat fp32 of the model's size, zero at the start."""

    kind: ClassVar[str]
    slots: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, moment: Moment) -> None:
        """Change `anchor` and `slots` in place. All are flat fp32 tensors of one size on the CPU."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sgd(Update):
    """phi <- phi - eta * delta. With eta = 1 and a mean this is plain parameter averaging (arXiv 1602.05629)."""

    kind: ClassVar[str] = "sgd"

    learning_rate: float = Field(default=1.0, gt=0, le=10)

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, moment: Moment) -> None:
        for part in _slabs(anchor):
            anchor[part] -= delta[part] * self.learning_rate


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Momentum(Update):
    """m <- mu * m + delta; what the step is made of beside m is the subclass's affair."""

    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    learning_rate: float = Field(default=0.7, gt=0, le=10)
    momentum: float = Field(default=0.9, ge=0, lt=1)

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, moment: Moment) -> None:
        for part in _slabs(anchor):
            momentum = slots["momentum"][part]
            momentum *= self.momentum
            momentum += delta[part]
            step = self._step(momentum, delta[part])
            step *= self.learning_rate
            anchor[part] -= step

    @abstractmethod
    def _step(self, momentum: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """A new tensor."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Nesterov(_Momentum):
    """Nesterov's momentum as in torch.optim.SGD(nesterov=True), the outer optimizer of DiLoCo (arXiv 2311.08105):

    m <- mu * m + delta;  phi <- phi - eta * (delta + mu * m)
    """

    kind: ClassVar[str] = "nesterov"

    def _step(self, momentum: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        step = momentum * self.momentum
        step += delta
        return step


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HeavyBall(_Momentum):
    """Polyak's momentum as in torch.optim.SGD(nesterov=False):

    m <- mu * m + delta;  phi <- phi - eta * m
    """

    kind: ClassVar[str] = "heavy-ball"

    def _step(self, momentum: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        return momentum.clone()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sign(Update):
    """phi <- phi * (1 - eta' * weight_decay) (matrices only);  phi <- phi - eta' * sign(delta), sign(0) = 0
    with eta' = eta times what is left of the run's learning rate (arXiv 1802.04434; DeMo, arXiv 2411.19870).

    Every weight moves by eta' or not at all, whatever the size of delta: eta belongs near an inner learning rate.
    """

    kind: ClassVar[str] = "sign"

    learning_rate: float = Field(default=0.001, gt=0, le=10)
    weight_decay: float = Field(default=0.0, ge=0, le=1)

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, moment: Moment) -> None:
        rate = self.learning_rate * moment.decay
        for start, stop in moment.matrices:
            anchor[start:stop] *= 1 - rate * self.weight_decay
        for part in _slabs(anchor):
            anchor[part] -= torch.sign(delta[part]) * rate


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Adam(Update):
    """AdamW (arXiv 1711.05101) on the merged gradient: data parallel training is this after every step.

    g <- delta * min(1, clip / |delta|)
    m <- beta1 * m + (1 - beta1) * g;  v <- beta2 * v + (1 - beta2) * g^2
    phi <- phi * (1 - eta' * weight_decay) (matrices only);  phi <- phi - eta' * m' / (sqrt(v') + eps)
    with x' = x / (1 - beta^(round + 1)) and eta' = eta times what is left of the run's learning rate
    """

    kind: ClassVar[str] = "adam"
    slots: ClassVar[tuple[str, ...]] = ("first_moment", "second_moment")

    learning_rate: float = Field(default=0.003, gt=0, le=10)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.1, ge=0, le=1)
    clip: float = Field(default=1.0, gt=0)

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, moment: Moment) -> None:
        rate, count = self.learning_rate * moment.decay, moment.round + 1
        size = norm(delta[part].numpy() for part in _slabs(delta))
        shrink = min(1.0, self.clip / size) if size else 1.0
        for start, stop in moment.matrices:
            anchor[start:stop] *= 1 - rate * self.weight_decay
        scale = math.sqrt(1 - self.beta2**count)
        for part in _slabs(anchor):
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
class Gossip(Update):
    """NoLoCo's step (arXiv 2506.10911) in a group whose members have anchors of their own; with the mean progress
    delta (uphill) and the mean anchor of the group:

    d <- alpha * d - beta * mean(delta) - gamma * (phi - mean(phi));  phi <- phi + d

    For the signal "progress-and-anchor". Stable pairs of (alpha, gamma) only: see `consensus_factor`.
    """

    kind: ClassVar[str] = "gossip"
    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    alpha: float = Field(default=0.5, ge=0, lt=1)
    beta: float = Field(default=0.7, gt=0, le=10)
    gamma: float = Field(default=0.7, ge=0, le=10)

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, moment: Moment) -> None:
        progress, mean = delta[: anchor.numel()], delta[anchor.numel() :]
        for part in _slabs(anchor):
            momentum = slots["momentum"][part]
            momentum *= self.alpha
            momentum -= progress[part] * self.beta
            momentum -= (anchor[part] - mean[part]) * self.gamma
            anchor[part] += momentum


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Replace(Update):
    """phi <- what was merged: for the signal "weights" (gossip averaging, arXiv 2410.11998)."""

    kind: ClassVar[str] = "replace"

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, moment: Moment) -> None:
        anchor.copy_(delta)


def _slabs(vector: torch.Tensor) -> Iterator[slice]:
    return (slice(start, start + SLAB) for start in range(0, vector.numel(), SLAB))

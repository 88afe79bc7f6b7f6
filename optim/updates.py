"""How the anchor moves by the aggregated pseudo-gradient.

Every peer applies the same update and must hold the same bits afterwards. Therefore each line is one elementwise
operation with one rounding: a fused `add(x, alpha=...)` is a fused multiply-add on some processors and not on others,
and at the ends of a vector not even on those.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.parts import STRICT

SLAB = 1 << 18  # values whose temporaries stay in the cache


class Update(ABC):
    """The outer optimizer. `slots` names its state vectors, each flat fp32 of the model's size, zero at the start."""

    kind: ClassVar[str]
    slots: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def apply(self, anchor: torch.Tensor, slots: Mapping[str, torch.Tensor], delta: torch.Tensor) -> None:
        """Change `anchor` and `slots` in place. All are flat fp32 tensors of one size on the CPU."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sgd(Update):
    """phi <- phi - eta * delta. With eta = 1 and a mean this is plain parameter averaging (arXiv 1602.05629)."""

    kind: ClassVar[str] = "sgd"

    learning_rate: float = Field(default=1.0, gt=0, le=10)

    def apply(self, anchor: torch.Tensor, slots: Mapping[str, torch.Tensor], delta: torch.Tensor) -> None:
        for part in _slabs(anchor):
            anchor[part] -= delta[part] * self.learning_rate


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Nesterov(Update):
    """Nesterov's momentum as in torch.optim.SGD(nesterov=True), the outer optimizer of DiLoCo (arXiv 2311.08105):

    m <- mu * m + delta;  phi <- phi - eta * (delta + mu * m)
    """

    kind: ClassVar[str] = "nesterov"
    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    learning_rate: float = Field(default=0.7, gt=0, le=10)
    momentum: float = Field(default=0.9, ge=0, lt=1)

    def apply(self, anchor: torch.Tensor, slots: Mapping[str, torch.Tensor], delta: torch.Tensor) -> None:
        for part in _slabs(anchor):
            momentum = slots["momentum"][part]
            momentum *= self.momentum
            momentum += delta[part]
            step = momentum * self.momentum
            step += delta[part]
            step *= self.learning_rate
            anchor[part] -= step


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HeavyBall(Update):
    """Polyak's momentum as in torch.optim.SGD(nesterov=False):

    m <- mu * m + delta;  phi <- phi - eta * m
    """

    kind: ClassVar[str] = "heavy-ball"
    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    learning_rate: float = Field(default=0.7, gt=0, le=10)
    momentum: float = Field(default=0.9, ge=0, lt=1)

    def apply(self, anchor: torch.Tensor, slots: Mapping[str, torch.Tensor], delta: torch.Tensor) -> None:
        for part in _slabs(anchor):
            momentum = slots["momentum"][part]
            momentum *= self.momentum
            momentum += delta[part]
            anchor[part] -= momentum * self.learning_rate


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sign(Update):
    """phi <- phi - eta * sign(delta), sign(0) = 0 (arXiv 1802.04434, and what arXiv 2411.19870 does with its mean).

    Every weight moves by eta or not at all, whatever the size of delta: eta belongs near an inner learning rate.
    """

    kind: ClassVar[str] = "sign"

    learning_rate: float = Field(default=0.001, gt=0, le=10)

    def apply(self, anchor: torch.Tensor, slots: Mapping[str, torch.Tensor], delta: torch.Tensor) -> None:
        for part in _slabs(anchor):
            anchor[part] -= torch.sign(delta[part]) * self.learning_rate


def _slabs(vector: torch.Tensor) -> Iterator[slice]:
    return (slice(start, start + SLAB) for start in range(0, vector.numel(), SLAB))

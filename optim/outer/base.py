"""What every update offers, and the rule that all of them keep.

Every peer applies the same update and must hold the same bits afterwards. Therefore each line is one elementwise
operation with one rounding: a fused `add(x, alpha=...)` is a fused multiply-add on some processors and not on others,
and at the ends of a vector not even on those.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from optim.kernels.vectors import norm, slabs
from optim.layout import Span

EPSILON = 1e-8

Slots = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class OuterStep:
    """`round`: how often these values were updated before; `step`: local steps of a peer before this round's; `decay`:
    the share of the run's learning rate that is left at that step, for updates that take an optimizer's place;
    `matrices`: where they stand, which alone are decayed."""

    count: int = 0
    local_steps: int = 0
    rate_decay: float = 1.0
    matrix_spans: tuple[Span, ...] = ()


class OuterOptimizer(ABC):
    """The outer optimizer. `slots` names its state vectors, each flat fp32 of the model's size, zero at the start.
    `signals`: the kinds of signal that it can make a step of."""

    kind: ClassVar[str]
    slots: ClassVar[tuple[str, ...]] = ()
    signals: ClassVar[tuple[str, ...]] = ("pseudo-gradient", "gradient", "inner-state")
    is_elementwise: ClassVar[bool] = False  # stretch by stretch, in any order and beside one another, gives the same

    @property
    def is_scaled_by_weight(self) -> bool:
        """Whether a round with less behind it than usual is to move by its share (see
        optim.aggregation.step_scaling)."""
        return False

    @abstractmethod
    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, outer_step: OuterStep) -> None:
        """Change `anchor` and `slots` in place. All are flat fp32 tensors of one size on the CPU."""

    @property
    def linear_rate(self) -> float | None:
        """Of an update that is phi <- phi - rate * delta, and no more."""
        return None


def tensor_slabs(vector: torch.Tensor) -> Iterator[slice]:
    return slabs(vector.numel())


def tensor_norm(vector: torch.Tensor) -> float:
    """The Euclidean norm, the same on every machine."""
    return norm([vector.numpy()])


def decay_weights(anchor: torch.Tensor, outer_step: OuterStep, fraction: float) -> None:
    """phi <- phi * (1 - share), matrices only."""
    for start, stop in outer_step.matrix_spans:
        anchor[start:stop] *= 1 - fraction

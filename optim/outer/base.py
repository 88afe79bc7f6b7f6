"""The interface of outer optimizers, and the rule that all of them follow.

Each peer applies the same step and must hold the same bits afterwards. Therefore each line is one elementwise operation
with one rounding: a fused `add(x, alpha=...)` is a fused multiply-add on some processors and not on others, and at the
ends of a vector not even on those.
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
    """The position of an outer step in the run.

    `count` is the number of earlier steps on the same values, `local_steps` the local steps of a peer before this
    round. `rate_decay` is the fraction of the run's learning rate left at that point, for optimizers that replace the
    inner one. Only `matrix_spans` are subject to weight decay.
    """

    count: int = 0
    local_steps: int = 0
    rate_decay: float = 1.0
    matrix_spans: tuple[Span, ...] = ()


class OuterOptimizer(ABC):
    """The rule by which the anchor moves after a round.

    `slots` names its state vectors: flat fp32 of the model's size, zero at the start. `signals` lists the kinds of
    signal that it accepts.
    """

    kind: ClassVar[str]
    slots: ClassVar[tuple[str, ...]] = ()
    positive_slots: ClassVar[tuple[str, ...]] = ()  # those that are never below zero
    signals: ClassVar[tuple[str, ...]] = ("pseudo-gradient", "gradient", "inner-state")
    counts_steps: ClassVar[bool] = False  # needs the number of earlier steps on the same values
    is_elementwise: ClassVar[bool] = False  # slabs may be stepped in any order, and in parallel

    @property
    def is_scaled_by_weight(self) -> bool:
        """Return whether a round of less weight than usual takes a smaller step (optim.aggregation.step_scaling)."""
        return False

    @abstractmethod
    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, outer_step: OuterStep) -> None:
        """Update `anchor` and `slots` in place. All are flat fp32 tensors of one size on the CPU."""

    @property
    def linear_rate(self) -> float | None:
        """Return the rate if the whole step is phi <- phi - rate * delta, else None."""
        return None


def tensor_slabs(vector: torch.Tensor) -> Iterator[slice]:
    return slabs(vector.numel())


def tensor_norm(vector: torch.Tensor) -> float:
    """Return the Euclidean norm, the same on every machine."""
    return norm([vector.numpy()])


def decay_weights(anchor: torch.Tensor, outer_step: OuterStep, fraction: float) -> None:
    """Apply phi <- phi * (1 - fraction) to matrices only."""
    for start, stop in outer_step.matrix_spans:
        anchor[start:stop] *= 1 - fraction

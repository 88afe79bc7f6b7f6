"""The interface of inner optimizers: one local step on flat fp32 vectors, on the model's device."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from optim.layout import Span

WEIGHTS = "weights"
EPSILON = 1e-8
FIRST_MOMENT = "first_moment"
SECOND_MOMENT = "second_moment"
GRADIENT_SUM = "gradient_sum"


@dataclass(frozen=True)
class InnerStep:
    """The position and the settings of one local step.

    `count` is the number of steps applied before, `rate` the learning rate of this one. Only `matrix_spans` are subject
    to weight decay. `tensor_spans` locates every tensor; empty means that the vector is one tensor.
    """

    count: int
    rate: float
    beta1: float
    beta2: float
    weight_decay: float
    matrix_spans: Sequence[Span]
    tensor_spans: Sequence[Span] = ()

    def with_count(self, count: int) -> "InnerStep":
        """Return this step with the count of an optimizer that counts its own steps."""
        return replace(self, count=count)

    def decay_weights(self, weights: Tensor) -> None:
        """Apply theta <- theta * (1 - rate * weight_decay) to matrices only."""
        for start, stop in self.matrix_spans:
            weights[start:stop].mul_(1 - self.rate * self.weight_decay)


def update_second_moment(second: Tensor, gradient: Tensor, step: InnerStep) -> Tensor:
    """Update v <- beta2 * v + (1 - beta2) * g^2 and return sqrt(v / (1 - beta2^count)) + eps."""
    # A second moment that was averaged between peers may be below zero by a rounding error.
    second.clamp_(min=0).mul_(step.beta2).addcmul_(gradient, gradient, value=1 - step.beta2)
    return second.sqrt().div_(math.sqrt(1 - step.beta2 ** (step.count + 1))).add_(EPSILON)


class InnerUpdateRule(ABC):
    """The rule of a local step.

    `vectors` names its state: flat fp32, zero at the start, saved in the trainer's snapshot.
    """

    kind: ClassVar[str]
    vectors: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def step(self, weights: Tensor, gradient: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> None:
        """Update `weights` and `vectors` in place; `gradient` is finite, clipped, and may be overwritten."""

    def vector_numel(self, name: str, numel: int) -> int:
        """Return the size of a state vector for a model of `numel` parameters, by default `numel`."""
        return numel

    def lookahead_weights(self, weights: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> Tensor | None:
        """Return the weights at which to compute this step's gradient, as a new vector; None means the current ones."""
        return None

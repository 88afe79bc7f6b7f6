"""What every inner optimizer offers: one local step on flat fp32 vectors, on the model's device."""

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
    """`count`: steps applied before, from 0. `rate`: the learning rate of this one. `matrices`: where the tensors of
    two dimensions stand, which alone are decayed; `tensors`: where each stands (none: the vector is one)."""

    count: int
    rate: float
    beta1: float
    beta2: float
    weight_decay: float
    matrix_spans: Sequence[Span]
    tensor_spans: Sequence[Span] = ()

    def with_count(self, count: int) -> "InnerStep":
        """The same for an optimizer that has made so many steps of its own."""
        return replace(self, count=count)

    def decay_weights(self, weights: Tensor) -> None:
        """theta <- theta * (1 - rate * weight_decay), matrices only."""
        for start, stop in self.matrix_spans:
            weights[start:stop].mul_(1 - self.rate * self.weight_decay)


def update_second_moment(second: Tensor, gradient: Tensor, step: InnerStep) -> Tensor:
    """v <- beta2 * v + (1 - beta2) * g^2;  returns sqrt(v') + eps, where v' = v / (1 - beta2^count)."""
    # A second moment that peers agree on may come out below zero by a rounding error.
    second.clamp_(min=0).mul_(step.beta2).addcmul_(gradient, gradient, value=1 - step.beta2)
    return second.sqrt().div_(math.sqrt(1 - step.beta2 ** (step.count + 1))).add_(EPSILON)


class InnerUpdateRule(ABC):
    """`vectors` names its state: flat fp32, zero at the start, part of the trainer's snapshot."""

    kind: ClassVar[str]
    vectors: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def step(self, weights: Tensor, gradient: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> None:
        """Change `weights` and `vectors` in place. `gradient` is finite, clipped, and may be changed too."""

    def vector_numel(self, name: str, numel: int) -> int:
        """Values of that vector, for a model of `numel` parameters: as many, if nothing else is said."""
        return numel

    def lookahead_weights(self, weights: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> Tensor | None:
        """Where the gradient of this step is to be taken, as a new vector; None: at the weights."""
        return None

"""The interface of inner optimizers: one local step on flat fp32 vectors, on the model's device."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from optim.kernels.vectors import slabs
from optim.layout import Layout, Shape, Span, clip_spans

WEIGHTS = "weights"
EPSILON = 1e-8
FIRST_MOMENT = "first_moment"
SECOND_MOMENT = "second_moment"
GRADIENT_SUM = "gradient_sum"


@dataclass(frozen=True)
class InnerStep:
    """The position and the settings of one local step.

    `count` is the number of steps applied before, `rate` the learning rate of this one. Only `matrix_spans` are subject
    to weight decay. `tensor_spans` locates every tensor; empty means that the vector is one tensor. `layer_matrices`
    gives place and shape (..., rows, columns) of the matrices of the layers, without embedding and output. `block` is
    the number of the first block of a part, for a rule that counts blocks of values.
    """

    count: int
    rate: float
    beta1: float
    beta2: float
    weight_decay: float
    matrix_spans: Sequence[Span]
    tensor_spans: Sequence[Span] = ()
    layer_matrices: Sequence[tuple[Span, Shape]] = ()
    block: int = 0

    def with_count(self, count: int) -> "InnerStep":
        """Return this step with the count of an optimizer that counts its own steps."""
        return replace(self, count=count)

    def within(self, start: int, stop: int) -> "InnerStep":
        """Return this step for a slab of the vectors, of which an elementwise rule needs no more."""
        return replace(
            self, matrix_spans=clip_spans(self.matrix_spans, start, stop), tensor_spans=(), layer_matrices=()
        )

    def of_tensor(self, start: int, stop: int) -> "InnerStep":
        """Return this step for one tensor, of which a rule that goes from tensor to tensor needs no more."""
        matrices = ((clip_spans((span,), start, stop), shape) for span, shape in self.layer_matrices)
        return replace(
            self,
            matrix_spans=clip_spans(self.matrix_spans, start, stop),
            tensor_spans=((0, stop - start),),
            layer_matrices=[(spans[0], shape) for spans, shape in matrices if spans],
        )

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

    `vectors` names its state: flat vectors, zero at the start, saved in the trainer's snapshot.
    """

    kind: ClassVar[str]
    vectors: ClassVar[tuple[str, ...]] = ()
    is_elementwise: ClassVar[bool] = False  # True: a step may be made slab by slab
    is_per_tensor: ClassVar[bool] = False  # True: it may be made tensor by tensor
    looks_ahead: ClassVar[bool] = False  # True: the gradient is taken at other weights than the model's

    @abstractmethod
    def step(self, weights: Tensor, gradient: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> None:
        """Update `weights` and `vectors` in place; `gradient` is finite, clipped, and may be overwritten."""

    def needs_whole(self, tensor: InnerStep) -> bool:
        """Return whether the step of one tensor needs all of it, and not only one part after the other."""
        return not self.is_elementwise

    def vector_numel(self, name: str, layout: Layout) -> int:
        """Return the size of a state vector for a model of this layout, by default a value for each parameter."""
        return layout.numel

    def vector_dtype(self, name: str) -> torch.dtype:
        """Return the type of a state vector's values."""
        return torch.float32

    def parts(self, numel: int, step: InnerStep, size: int) -> Iterable[slice]:
        """Cut the parameters into parts of at most `size` that can be stepped one by one; one part if they cannot."""
        return slabs(numel, size) if self.is_elementwise else (slice(0, numel),)

    def part_of(
        self, part: slice, vectors: Mapping[str, Tensor], step: InnerStep
    ) -> tuple[Mapping[str, Tensor], InnerStep]:
        """Return vectors and step of one of these parts."""
        if not self.is_elementwise:
            return vectors, step
        return {name: vector[part] for name, vector in vectors.items()}, step.within(part.start, part.stop)

    def lookahead_weights(self, weights: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> Tensor | None:
        """Return the weights at which to compute this step's gradient, as a new vector; None means the current ones."""
        return None

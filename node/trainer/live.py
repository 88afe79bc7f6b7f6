"""Weights and optimizer vectors in training: in the shared memory, or copied from and into it.

Our model on a CPU trains the vectors in the shared memory. A model on an accelerator, or in a user's own loop, has its
own memory, which the trainer copies.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from node.model import LanguageModel
from node.trainer.inner_step import InnerOptimizer
from optim.inner.base import WEIGHTS


class FlatModel(Protocol):
    """A model whose parameters are views of `flat` (numel,), fp32."""

    flat: Tensor

    def load_flat(self, flat: Tensor) -> None:
        """Copy all weights from `flat` (numel,), fp32 on any device."""


class OptimizerVectors(Protocol):
    """The state of an inner optimizer: flat fp32 vectors by name, and the age of the run when it began."""

    age_at_join: int
    moments_age_at_join: int

    @property
    def vectors(self) -> Mapping[str, Tensor]: ...


class LiveVectors(ABC):
    """The weights and the vectors of the inner optimizer of one trainer."""

    is_shared: ClassVar[bool] = False  # True: they are the vectors in the shared memory

    def attach(self, shared: Mapping[str, Tensor], gradient: Tensor) -> None:  # noqa: B027  # most have their own memory
        """Train with these vectors from now on; `gradient` is free during a step."""

    @abstractmethod
    def save(self, shared: Mapping[str, Tensor]) -> None:
        """Copy the vectors into the shared memory."""

    @abstractmethod
    def load(self, shared: Mapping[str, Tensor]) -> None:
        """Copy the vectors from the shared memory."""

    @abstractmethod
    def clear(self, names: Sequence[str]) -> None:
        """Set vectors of the optimizer to zero."""

    @property
    def can_shift(self) -> bool:
        """Return whether the weights can be moved without a copy of them in the shared memory."""
        return False

    def shift(self, difference: Tensor) -> None:
        """Add a vector (numel,), fp32 on the CPU, to the weights."""
        raise NotImplementedError


class VectorsInPlace(LiveVectors):
    """The vectors in the shared memory, with which a model on the CPU trains.

    `has_open_gradient`: the gradient of a step may be needed after another anchor is applied, so it has memory of its
    own.
    """

    is_shared = True

    def __init__(self, model: LanguageModel, optimizer: InnerOptimizer, has_open_gradient: bool) -> None:
        self._model = model
        self._optimizer = optimizer
        self._has_open_gradient = has_open_gradient

    def attach(self, shared: Mapping[str, Tensor], gradient: Tensor) -> None:
        self._model.use_memory(shared[WEIGHTS], None if self._has_open_gradient else gradient)
        self._optimizer.use_vectors(shared)

    def save(self, shared: Mapping[str, Tensor]) -> None:
        pass

    def load(self, shared: Mapping[str, Tensor]) -> None:
        pass

    def clear(self, names: Sequence[str]) -> None:
        pass


class CopiedVectors(LiveVectors):
    """Vectors on an accelerator, or of a user's own loop."""

    def __init__(self, model: FlatModel, optimizer: OptimizerVectors) -> None:
        self._model = model
        self._optimizer = optimizer

    def save(self, shared: Mapping[str, Tensor]) -> None:
        for name, vector in {WEIGHTS: self._model.flat, **self._optimizer.vectors}.items():
            shared[name].copy_(vector)

    def load(self, shared: Mapping[str, Tensor]) -> None:
        self._model.load_flat(shared[WEIGHTS])
        for name, vector in self._optimizer.vectors.items():
            vector.copy_(shared[name])

    def clear(self, names: Sequence[str]) -> None:
        for name in names:
            self._optimizer.vectors[name].zero_()

    @property
    def can_shift(self) -> bool:
        return self._model.flat.dtype == torch.float32

    def shift(self, difference: Tensor) -> None:
        self._model.flat.add_(difference.to(self._model.flat.device))


def live_vectors(
    model: FlatModel, optimizer: OptimizerVectors, *, has_open_gradient: bool = False
) -> VectorsInPlace | CopiedVectors:
    """Return the vectors of a model in this process, in place where that is possible."""
    if isinstance(model, LanguageModel) and isinstance(optimizer, InnerOptimizer) and model.flat.device.type == "cpu":
        return VectorsInPlace(model, optimizer, has_open_gradient)
    return CopiedVectors(model, optimizer)

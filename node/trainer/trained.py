"""The two things of a trainer that rounds read and write: flat weights, and the vectors of an inner optimizer."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


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

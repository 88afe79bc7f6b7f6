"""The inner optimizer of a training loop that is not ours: the loop has stepped before the method looks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from optim.inner.base import InnerStep, InnerUpdateRule


@dataclass(frozen=True, kw_only=True)
class ExternalOptimizer(InnerUpdateRule):
    """Stands for an optimizer of which the method knows nothing. It has no vectors, and no manifest can name it."""

    kind: ClassVar[str] = "external"

    def step(self, weights: Tensor, gradient: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> None:
        raise NotImplementedError("a training loop of its own makes its steps itself")

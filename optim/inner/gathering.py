"""No local step at all: gradients are summed until they are sent, and the weights move with the anchor only."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic.dataclasses import dataclass
from torch import Tensor

from optim.inner.inner import GRADIENT_SUM, Inner, Step
from optim.parts import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Gathering(Inner):
    """G <- G + g;  theta stays"""

    kind: ClassVar[str] = "gathering"
    vectors: ClassVar[tuple[str, ...]] = (GRADIENT_SUM,)

    def step(self, weights: Tensor, gradient: Tensor, vectors: Mapping[str, Tensor], step: Step) -> None:
        vectors[GRADIENT_SUM].add_(gradient)

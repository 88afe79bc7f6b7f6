"""Inner optimizers without local steps: they sum gradients, or the training loop of a user makes the steps."""

from collections.abc import Mapping
from dataclasses import dataclass as plain_dataclass
from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from optim.inner.base import GRADIENT_SUM, InnerStep, InnerUpdateRule
from optim.options import STRICT

MOMENTUM = "momentum"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GradientAccumulator(InnerUpdateRule):
    """G <- G + g;  theta does not change."""

    kind: ClassVar[str] = "gathering"
    is_elementwise: ClassVar[bool] = True
    vectors: ClassVar[tuple[str, ...]] = (GRADIENT_SUM,)

    def step(self, weights: Tensor, gradient: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> None:
        vectors[GRADIENT_SUM].add_(gradient)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LookaheadAccumulator(InnerUpdateRule):
    """Gradients are summed, each computed at the weights that the next outer step is likely to reach.

        G <- G + g;  M <- beta * M + g;  theta does not change;  g at theta - reach * rate * sign(M)

    For signs that are applied a step late (DisTrO, the public code of arXiv 2411.19870). `reach` is the outer rate in
    units of the run's. (In that code M is the unsent part of the peer's momentum; here it is all of it.)
    """

    kind: ClassVar[str] = "gathering-ahead"
    looks_ahead: ClassVar[bool] = True
    is_elementwise: ClassVar[bool] = True
    vectors: ClassVar[tuple[str, ...]] = (GRADIENT_SUM, MOMENTUM)

    beta: float = Field(default=0.999, ge=0, lt=1)
    reach: float = Field(default=0.3, ge=0, le=10)

    def step(self, weights: Tensor, gradient: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> None:
        vectors[GRADIENT_SUM].add_(gradient)
        vectors[MOMENTUM].mul_(self.beta).add_(gradient)

    def lookahead_weights(self, weights: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> Tensor | None:
        return weights.sub(vectors[MOMENTUM].sign(), alpha=self.reach * step.rate)


@plain_dataclass(frozen=True, kw_only=True)
class ExternalOptimizer(InnerUpdateRule):
    """Stands for an optimizer of which the method knows nothing. It has no vectors, and no manifest can name it."""

    kind: ClassVar[str] = "external"

    def step(self, weights: Tensor, gradient: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> None:
        raise NotImplementedError("a training loop of its own makes its steps itself")

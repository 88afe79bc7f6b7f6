"""AccumAdam: moments that take in the mean gradient of several steps (arXiv 2410.11998).

A peer's own batch is small, and the squares of its noisy gradients make v too large: n peers that average gradients
would see n times less of that noise. So each step looks at what the moments would become, but they only change every
s-th step, by the mean gradient of those s; s should grow with the number of peers. (The public helper also swaps the
groups of weight decay, so that it decays all but the matrices; here it is the matrices.)
"""

import math
from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from optim.inner.inner import EPSILON, FIRST_MOMENT, SECOND_MOMENT, InnerUpdateRule, InnerStep
from optim.parts import STRICT

ACCUMULATED = "accumulated"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AccumulatingAdamW(InnerUpdateRule):
    """m' = beta1 * m + (1 - beta1) * g;  v' = beta2 * v + (1 - beta2) * g^2;  n = ceil(count / s)
    theta <- theta * (1 - rate * weight_decay)            matrices only
    theta <- theta - rate * m' / (1 - beta1^n) / (sqrt(v' / (1 - beta2^n)) + eps)
    every s-th step:  m, v <- as m', v', but with the mean of the last s gradients
    """

    kind: ClassVar[str] = "accumulating-adamw"
    vectors: ClassVar[tuple[str, ...]] = (FIRST_MOMENT, SECOND_MOMENT, ACCUMULATED)

    every: int = Field(default=4, ge=1, le=1000, description="steps between two changes of the moments")

    def step(self, weights: Tensor, gradient: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> None:
        first, second, accumulated = vectors[FIRST_MOMENT], vectors[SECOND_MOMENT], vectors[ACCUMULATED]
        count = step.count // self.every + 1
        accumulated += gradient
        step.decay_weights(weights)
        candidate = (second * step.beta2).addcmul_(gradient, gradient, value=1 - step.beta2)
        spread = candidate.sqrt_().div_(math.sqrt(1 - step.beta2**count)).add_(EPSILON)
        weights.addcdiv_(first.lerp(gradient, 1 - step.beta1), spread, value=-step.rate / (1 - step.beta1**count))
        if (step.count + 1) % self.every == 0:
            mean = accumulated / self.every
            first.lerp_(mean, 1 - step.beta1)
            second.mul_(step.beta2).addcmul_(mean, mean, value=1 - step.beta2)
            accumulated.zero_()

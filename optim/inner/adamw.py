"""AdamW (arXiv 1711.05101). Written out here because torch.optim imports the compiler at its first use: a second more
at each restart of a trainer."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic.dataclasses import dataclass
from torch import Tensor

from optim.inner.inner import FIRST_MOMENT, SECOND_MOMENT, InnerUpdateRule, InnerStep, update_second_moment
from optim.parts import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AdamW(InnerUpdateRule):
    """m <- beta1 * m + (1 - beta1) * g;  v <- beta2 * v + (1 - beta2) * g^2
    theta <- theta * (1 - rate * weight_decay)            matrices only
    theta <- theta - rate * m' / (sqrt(v') + eps), where x' = x / (1 - beta^count) corrects the zero start
    """

    kind: ClassVar[str] = "adamw"
    vectors: ClassVar[tuple[str, ...]] = (FIRST_MOMENT, SECOND_MOMENT)

    def step(self, weights: Tensor, gradient: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> None:
        first, second, count = vectors[FIRST_MOMENT], vectors[SECOND_MOMENT], step.count + 1
        step.decay_weights(weights)
        first.lerp_(gradient, 1 - step.beta1)
        spread = update_second_moment(second, gradient, step)
        weights.addcdiv_(first, spread, value=-step.rate / (1 - step.beta1**count))

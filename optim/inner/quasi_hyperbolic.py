"""Adam with a slow momentum beside the fresh gradient (MT-DAO, arXiv 2510.05361; the form is QHAdam's, 1810.06801).

After K local steps a share beta^K of what the peers last agreed on is left in a momentum: 0.03 for beta = 0.9 and
K = 32, but 0.97 for beta = 0.999. So a slow momentum that is averaged with the weights keeps all peers on the common
course between two exchanges, while the share 1 - w of the fresh gradient keeps it from being sluggish. (The paper has
ADOPT's denominators under it, with beta2 = 0.9999; here they are Adam's.)
"""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from optim.inner.inner import FIRST_MOMENT, SECOND_MOMENT, InnerUpdateRule, InnerStep, update_second_moment
from optim.parts import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class QuasiHyperbolic(InnerUpdateRule):
    """u <- beta * u + (1 - beta) * g;  v <- beta2 * v + (1 - beta2) * g^2
    theta <- theta * (1 - rate * weight_decay)            matrices only
    theta <- theta - rate * ((1 - w) * g + w * u') / (sqrt(v') + eps), where x' = x / (1 - beta^count)

    w = 1 with the run's own beta1 is AdamW, w = 0 RMSProp.
    """

    kind: ClassVar[str] = "quasi-hyperbolic"
    vectors: ClassVar[tuple[str, ...]] = (FIRST_MOMENT, SECOND_MOMENT)

    beta: float = Field(default=0.999, ge=0, lt=1, description="of the slow momentum; takes the place of train.beta1")
    weight: float = Field(default=0.9, ge=0, le=1, description="of the slow momentum in the step")

    def step(self, weights: Tensor, gradient: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> None:
        slow, second, count = vectors[FIRST_MOMENT], vectors[SECOND_MOMENT], step.count + 1
        step.decay_weights(weights)
        slow.lerp_(gradient, 1 - self.beta)
        spread = update_second_moment(second, gradient, step)
        course = gradient.mul_(1 - self.weight).add_(slow, alpha=self.weight / (1 - self.beta**count))
        weights.addcdiv_(course, spread, value=-step.rate)

"""AdamW and three variants of it.

AdamW (arXiv 1711.05101) is written out here because torch.optim imports torch's compiler at its first use, which costs
a second at each restart of a trainer.

QuasiHyperbolic adds a slow momentum to the fresh gradient (MT-DAO, arXiv 2510.05361, in the form of QHAdam,
1810.06801). After K local steps, beta^K of the momentum that the peers last agreed on is left: 0.03 for beta = 0.9 and
K = 32, but 0.97 for beta = 0.999. A slow momentum that is averaged along with the weights therefore keeps all peers on
a common course between two exchanges, while the fraction 1 - w of the fresh gradient keeps the step responsive. (The
paper uses ADOPT's denominators with beta2 = 0.9999; here they are Adam's.)

AccumulatingAdamW updates the moments with the mean gradient of several steps (AccumAdam, arXiv 2410.11998). The batch
of one peer is small, and the squares of its noisy gradients make v too large: n peers that averaged their gradients
would see n times less of that noise. So each step looks at the moments as they would become, but they change only every
s-th step, by the mean gradient of those s; s should grow with the number of peers. (The public helper also swaps the
groups of weight decay, so that it decays everything but the matrices; here it is the matrices.)

PrimalAveraging trains one sequence of weights and keeps the running mean of them, at which a model is judged and from
which a contribution is measured (GPA, arXiv 2512.17131). For one peer it does at every step what DiLoCo's outer
momentum does every H steps: mu_x = 0.9^(1/H), so 0.9967 stands for 32 steps and forgets in about 300. A short run wants
a smaller one.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from optim.inner.base import EPSILON, FIRST_MOMENT, SECOND_MOMENT, InnerStep, InnerUpdateRule, update_second_moment
from optim.options import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AdamW(InnerUpdateRule):
    """AdamW (arXiv 1711.05101).

        m <- beta1 * m + (1 - beta1) * g;  v <- beta2 * v + (1 - beta2) * g^2
        theta <- theta * (1 - rate * weight_decay)            matrices only
        theta <- theta - rate * m' / (sqrt(v') + eps)

    where x' = x / (1 - beta^count) corrects the zero start.
    """

    kind: ClassVar[str] = "adamw"
    is_elementwise: ClassVar[bool] = True
    vectors: ClassVar[tuple[str, ...]] = (FIRST_MOMENT, SECOND_MOMENT)

    def step(self, weights: Tensor, gradient: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> None:
        first, second, count = vectors[FIRST_MOMENT], vectors[SECOND_MOMENT], step.count + 1
        step.decay_weights(weights)
        if weights.is_cuda:
            step_fused(weights, gradient, first, second, step)
            return
        first.lerp_(gradient, 1 - step.beta1)
        spread = update_second_moment(second, gradient, step)
        weights.addcdiv_(first, spread, value=-step.rate / (1 - step.beta1**count))


def step_fused(weights: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: InnerStep) -> None:
    """Make the step of AdamW, but for the weight decay, in one kernel of torch, which reads every vector once.

    The bits differ from those of the formula written out, so auditors with another kind of device do not repeat it.
    """
    second.clamp_(min=0)  # after an average between peers it may be below zero by a rounding error
    count = torch.full((), float(step.count + 1), device=weights.device)
    torch._fused_adamw_(
        *([weights], [gradient], [first], [second], [], [count]),
        lr=step.rate,
        beta1=step.beta1,
        beta2=step.beta2,
        weight_decay=0.0,
        eps=EPSILON,
        amsgrad=False,
        maximize=False,
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class QuasiHyperbolic(InnerUpdateRule):
    """AdamW with a slow momentum in addition to the fresh gradient (arXiv 2510.05361, 1810.06801).

        u <- beta * u + (1 - beta) * g;  v <- beta2 * v + (1 - beta2) * g^2
        theta <- theta * (1 - rate * weight_decay)            matrices only
        theta <- theta - rate * ((1 - w) * g + w * u') / (sqrt(v') + eps)

    where x' = x / (1 - beta^count). w = 1 with the run's own beta1 is AdamW, w = 0 is RMSProp.
    """

    kind: ClassVar[str] = "quasi-hyperbolic"
    is_elementwise: ClassVar[bool] = True
    vectors: ClassVar[tuple[str, ...]] = (FIRST_MOMENT, SECOND_MOMENT)

    beta: float = Field(default=0.999, ge=0, lt=1, description="of the slow momentum, instead of train.beta1")
    weight: float = Field(default=0.9, ge=0, le=1, description="weight of the slow momentum in the step")

    def step(self, weights: Tensor, gradient: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> None:
        slow, second, count = vectors[FIRST_MOMENT], vectors[SECOND_MOMENT], step.count + 1
        step.decay_weights(weights)
        slow.lerp_(gradient, 1 - self.beta)
        spread = update_second_moment(second, gradient, step)
        course = gradient.mul_(1 - self.weight).add_(slow, alpha=self.weight / (1 - self.beta**count))
        weights.addcdiv_(course, spread, value=-step.rate)


ACCUMULATED = "accumulated"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AccumulatingAdamW(InnerUpdateRule):
    """AdamW whose moments change every s-th step, by the mean of s gradients (arXiv 2410.11998).

    m' = beta1 * m + (1 - beta1) * g;  v' = beta2 * v + (1 - beta2) * g^2;  n = ceil(count / s)
    theta <- theta * (1 - rate * weight_decay)            matrices only
    theta <- theta - rate * m' / (1 - beta1^n) / (sqrt(v' / (1 - beta2^n)) + eps)
    every s-th step:  m, v <- as m', v', but with the mean of the last s gradients
    """

    kind: ClassVar[str] = "accumulating-adamw"
    is_elementwise: ClassVar[bool] = True
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


LEAD = "lead"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PrimalAveraging(InnerUpdateRule):
    """AdamW whose iterates are averaged at every step: generalized primal averaging (arXiv 2512.17131).

        g at y = mu_y * x + (1 - mu_y) * z
        m <- beta1 * m + (1 - beta1) * g;  v <- beta2 * v + (1 - beta2) * g^2
        z <- z * (1 - rate * weight_decay)            matrices only
        z <- z - rate * m' / (sqrt(v') + eps)
        x <- mu_x * x + (1 - mu_x) * z

    where x' = x / (1 - beta^count). The weights of the model are x; the state has z - x, so z follows the anchor when
    x moves there. mu_x = 0 is AdamW.
    """

    kind: ClassVar[str] = "gpa"
    is_elementwise: ClassVar[bool] = True
    looks_ahead: ClassVar[bool] = True
    vectors: ClassVar[tuple[str, ...]] = (FIRST_MOMENT, SECOND_MOMENT, LEAD)

    mu_x: float = Field(default=0.9967, ge=0, lt=1, description="share of the mean that a step keeps")
    mu_y: float = Field(default=0.7, ge=0, le=1, description="share of the mean in the weights of the gradient")

    def step(self, weights: Tensor, gradient: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> None:
        first, second, lead = vectors[FIRST_MOMENT], vectors[SECOND_MOMENT], vectors[LEAD]
        for start, stop in step.matrix_spans:
            lead[start:stop].sub_(weights[start:stop] + lead[start:stop], alpha=step.rate * step.weight_decay)
        first.lerp_(gradient, 1 - step.beta1)
        spread = update_second_moment(second, gradient, step)
        lead.addcdiv_(first, spread, value=-step.rate / (1 - step.beta1 ** (step.count + 1)))
        weights.add_(lead, alpha=1 - self.mu_x)
        lead.mul_(self.mu_x)

    def lookahead_weights(self, weights: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> Tensor | None:
        return weights.add(vectors[LEAD], alpha=1 - self.mu_y) if self.mu_y < 1 else None

"""Batches that grow by the norm test (AdLoCo, arXiv 2508.18182; the test: arXiv 1710.05782).

A mean gradient is worth a step while its noise is small compared with it. With the gradients g_j of the n local steps
that are gathered for one optimizer step, and their mean g:

    S = sum_j |g_j - g|^2 / (n - 1);   wanted <- max(wanted, ceil(S / (theta^2 |g|^2)))

Few gradients are enough early in a run, many are needed late: peers then move, and drift apart, less between two
contributions. The batch follows the paper's switch mode: up to `at_once` it is the wanted size, up to twice that it
stays there, and beyond that it is a whole multiple. It is counted in local steps (batches of train.batch_tokens), by
each peer for itself.

The paper merges several models over the run; here there is one, the anchor. (Its public text counts H in optimizer
steps; here the schedule counts local steps, so that contributions stay as far apart as the budget says.)
"""

import math
from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass
from torch import Tensor

from optim.inner.adamw import AdamW
from optim.inner.base import FIRST_MOMENT, SECOND_MOMENT, InnerStep, InnerUpdateRule
from optim.layout import Layout
from optim.options import STRICT

ACCUMULATED = "accumulated"
TALLY = "tally"  # gradients gathered, sum of their squared norms, wanted batch size, optimizer steps


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GrowingBatch(InnerUpdateRule):
    """AdamW on the mean of n local gradients, where n grows by the norm test (arXiv 2508.18182).

    G <- G + g_j for n local steps, then AdamW with the mean G / n, and
    n <- max(n, ceil(sum_j |g_j - G / n|^2 / (n - 1) / (theta^2 |G / n|^2))), at most `most`
    """

    kind: ClassVar[str] = "growing-batch"
    vectors: ClassVar[tuple[str, ...]] = (FIRST_MOMENT, SECOND_MOMENT, ACCUMULATED, TALLY)

    start: int = Field(default=2, ge=2, le=1000, description="local steps of the first batch; a variance needs 2")
    theta: float = Field(default=0.8, gt=0, le=10, description="accepted noise of a step, relative to its gradient")
    at_once: int = Field(default=8, ge=1, le=1000, description="larger batches are whole multiples of it")
    most: int = Field(default=64, ge=2, le=10_000, description="local steps of the largest batch")

    @model_validator(mode="after")
    def _check_start(self) -> "GrowingBatch":
        if self.start > self.most:
            raise ValueError("start must not be above most")
        return self

    def vector_numel(self, name: str, layout: Layout) -> int:
        return 4 if name == TALLY else layout.numel

    def step(self, weights: Tensor, gradient: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> None:
        accumulated, tally = vectors[ACCUMULATED], vectors[TALLY]
        accumulated += gradient
        tally[0] += 1
        tally[1] += gradient.square().sum()
        count, squares, wanted, steps = tally.tolist()
        if count < self.rounded_batch_size(wanted):
            return
        mean = accumulated / count
        tally[2] = max(wanted, self.noise_batch_size(int(count), squares, float(mean.square().sum())))
        AdamW().step(weights, mean, vectors, step.with_count(int(steps)))
        accumulated.zero_()
        tally[:2] = 0
        tally[3] += 1

    def noise_batch_size(self, count: int, squares: float, size: float) -> int:
        """Return the batch size that the norm test asks for.

        Args:
            count: the number of gradients gathered.
            squares: the sum of their squared norms.
            size: the squared norm of their mean.
        """
        variance = max(0.0, squares - count * size) / max(1, count - 1)
        if variance == 0:
            return 0
        noise = variance / (self.theta**2 * size) if size else math.inf
        return self.most if noise > self.most else math.ceil(noise)

    def rounded_batch_size(self, wanted: float) -> int:
        """Return the number of local steps to gather when the test asks for `wanted`."""
        count = max(self.start, round(wanted))
        if count > 2 * self.at_once:
            count = -(-count // self.at_once) * self.at_once
        elif count > self.at_once:
            count = max(self.start, self.at_once)
        return min(self.most, count)

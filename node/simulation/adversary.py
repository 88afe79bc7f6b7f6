"""Peers that lie: they train like the others and send false contributions.

sign-flip   x <- -x            scale10   x <- 10 x
zero        x <- 0             random    x <- noise of the same norm

Others lie about their work (`node.simulation.lying_trainers`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from optim.codecs.base import Payload
from optim.exchange import ContributionEncoder
from optim.round_plan import RoundPlanner

LieKind = Literal["sign-flip", "scale10", "zero", "random", "fewer-steps", "wrong-data", "stale-replay"]
ENCODER_LIES: Final = ("sign-flip", "scale10", "zero", "random")
LIE_KINDS: Final[tuple[str, ...]] = get_args(LieKind)


@dataclass(frozen=True)
class Adversaries:
    """The fraction of peers that lie, rounded to whole peers, and the kind of lie."""

    fraction: float
    kind: LieKind

    def count(self, peers: int) -> int:
        return round(self.fraction * peers)


class LyingEncoder(ContributionEncoder):
    """Encodes a false contribution instead of the true one."""

    def __init__(self, planner: RoundPlanner, kind: LieKind, seed: int) -> None:
        super().__init__(planner)
        self._generator = torch.Generator().manual_seed(seed)
        self._falsify = self._falsifiers()[kind]

    def encode(self, round_number: int, delta: Tensor, residual: Tensor) -> list[Payload]:
        return super().encode(round_number, self._falsify(delta), residual)

    def _falsifiers(self) -> dict[LieKind, Callable[[Tensor], Tensor]]:
        return {
            "sign-flip": torch.neg,
            "scale10": lambda delta: delta * 10,
            "zero": torch.zeros_like,
            "random": self._noise,
        }

    def _noise(self, delta: Tensor) -> Tensor:
        noise = torch.randn(delta.shape, generator=self._generator)
        return noise.mul_(torch.linalg.vector_norm(delta) / torch.linalg.vector_norm(noise))

"""What is exchanged."""

from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass

from optim.parts import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PseudoGradient:
    """How far the weights moved since `reference`, pointing uphill as a gradient does (arXiv 2311.08105)."""

    kind: ClassVar[str] = "pseudo-gradient"

    def measure(self, reference: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """delta = reference - weights; both flat fp32."""
        return reference - weights


Signal = PseudoGradient

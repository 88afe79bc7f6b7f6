"""Rounding to bf16, up or down with the probability that keeps the mean.

A weight in bf16 has 8 significant bits, and an update is often less than half of the last one: rounded to the nearest
value, the weight never moves. Rounded stochastically it moves as far on average (arXiv 2010.06192).
"""

from typing import Final

import torch
from torch import Tensor

from optim.kernels.vectors import slabs

LOST_BITS: Final = 16
SLAB_VALUES: Final = 1 << 24


class StochasticRounding:
    """Rounds with noise of its own; `seed` None draws one, so that peers do not round alike."""

    def __init__(self, device: torch.device, seed: int | None = None) -> None:
        self._generator = torch.Generator(device)
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def copy(self, values: Tensor, out: Tensor) -> None:
        """Round `values` (n,), fp32 on any device, into `out` (n,) bf16. Values that bf16 has keep their bits."""
        for slab in slabs(out.numel(), SLAB_VALUES):
            bits = values[slab].to(out.device, copy=True).view(torch.int32)
            noise = torch.empty_like(bits).random_(0, 1 << LOST_BITS, generator=self._generator)
            bits.add_(noise).bitwise_and_(-1 << LOST_BITS)
            out[slab].copy_(bits.view(torch.float32))

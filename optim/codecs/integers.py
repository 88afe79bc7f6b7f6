"""Blockwise 8-bit and 4-bit integers: each block is scaled by its largest magnitude (arXiv 2110.02861, linear map).

    scale = max |x| / L, rounded up, L = 127 or 7;  q = round(x / scale);  decoded = q * scale

With blocks of 256 these are 8.06 and 4.06 bits a parameter, and on normally distributed values the relative error is
0.007 and 0.126. `stochastic` rounds up with the probability of the fraction, so that the mean is right (arXiv
2302.02390, there with blocks of 1024): q = floor(x / scale + u), u in [0, 1). The error is then sqrt(2) times as large.
"""

from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic.dataclasses import dataclass

from optim.codecs.blocks import BlockCodec, Integers, inverses, largest_of_rows
from optim.codecs.noise import fractions
from optim.parts import STRICT
from optim.threads import scratch
from optim.vectors import Floats


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _BlockIntegers(BlockCodec):
    levels: ClassVar[int]

    rounding: Literal["nearest", "stochastic"] = "nearest"

    def _scale(self, rows: torch.Tensor, sizes: Floats) -> Floats:
        return largest_of_rows(rows) / np.float32(self.levels)

    def _quantize(self, rows: torch.Tensor, scales: Floats, place: int, codes: Integers) -> None:
        quotients = torch.from_numpy(scratch("floats", np.float32, rows.numel())).view(rows.shape)
        torch.mul(rows, inverses(scales), out=quotients)
        if self.rounding == "stochastic":
            quotients += torch.from_numpy(fractions(scales, place, tuple(rows.shape), self.binding))
            quotients.floor_().clamp_(-self.levels, self.levels)
        else:
            quotients.round_()
        torch.from_numpy(codes).copy_(quotients)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BlockInt8(_BlockIntegers):
    """One byte a value, in two's complement: scale = max |x| / 127 of a block;  decoded = round(x / scale) * scale"""

    kind: ClassVar[str] = "int8"
    number: ClassVar[int] = 3
    version: ClassVar[int] = 2
    bits: ClassVar[int] = 8
    levels: ClassVar[int] = 127

    def multiples(self, codes: Integers) -> None:
        """A code is its own multiple."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BlockInt4(_BlockIntegers):
    """Two values a byte, in two's complement: scale = max |x| / 7 of a block;  decoded = round(x / scale) * scale"""

    kind: ClassVar[str] = "int4"
    number: ClassVar[int] = 6
    version: ClassVar[int] = 2
    bits: ClassVar[int] = 4
    levels: ClassVar[int] = 7

    def multiples(self, codes: Integers) -> None:
        codes &= np.int8(0x0F)
        codes ^= np.int8(0x08)
        codes -= np.int8(0x08)

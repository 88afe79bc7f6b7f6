"""One bit a value: its sign, under the mean magnitude of its block (arXiv 2102.02888).

    scale = sum |x| / n;  decoded = scale where x >= 0, else -scale

Of all scales the mean leaves the least squared error (the root of the mean square would keep the norm instead). 1.02
bits a parameter; on normally distributed values the relative error is 0.60, so error feedback is needed.
"""

from typing import ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.codecs.blocks import BlockCodec, Integers
from optim.compiled import compiled
from optim.parts import STRICT
from optim.vectors import Floats


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BlockSign(BlockCodec):
    kind: ClassVar[str] = "sign"
    number: ClassVar[int] = 8
    version: ClassVar[int] = 2
    bits: ClassVar[int] = 1
    round_up: ClassVar[int] = 0x8000  # to nearest

    block: int = Field(default=1024, ge=16, le=65_536, multiple_of=8, description="values that share a scale")

    def measure(self, values: Floats, scales: Floats) -> None:
        _means(values, self.block, scales)

    def quantize(self, values: Floats, scales: Floats, place: int, codes: Integers) -> None:
        _negative(values, codes)

    def multiples(self, codes: Integers) -> None:
        _signs(codes)


@compiled
def _means(values: Floats, block: int, means: Floats) -> None:
    """Of each block's magnitudes. The second half is added to the first until one is left, a short block filled up with
    zeros: an order that never depends on the machine."""
    sums = np.empty(block, np.float32)
    for place in range(means.size):
        row = values[place * block : (place + 1) * block]
        sums[:] = np.float32(0)
        for i in range(row.size):
            sums[i] = abs(row[i])
        count = block
        while count > 1:
            half = (count + 1) // 2
            above = sums[half:count]
            for i in range(above.size):
                sums[i] += above[i]
            count = half
        means[place] = sums[0] / np.float32(row.size)


@compiled
def _negative(values: Floats, codes: Integers) -> None:
    for i in range(values.size):
        codes[i] = np.int8(values[i] < 0)


@compiled
def _signs(codes: Integers) -> None:
    for i in range(codes.size):
        codes[i] = np.int8(1) - (codes[i] << np.int8(1))

"""One bit per value: its sign, scaled by the mean magnitude of its block (arXiv 2102.02888).

    scale = sum |x| / n;  decoded = scale where x >= 0, else -scale

Of all scales the mean has the least squared error (the root of the mean square would keep the norm instead). This takes
1.02 bits per parameter; on normally distributed values the relative error is 0.60, so error feedback is needed.
"""

from functools import partial
from typing import ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.codecs.bits.packing import Integers
from optim.codecs.blocks import ROUND_NEAREST, BlockCodec, BlockEncoder, Halves, mean_magnitude, round_scale
from optim.kernels.jit import kernel
from optim.kernels.vectors import Floats
from optim.options import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BlockSign(BlockCodec):
    kind: ClassVar[str] = "sign"
    number: ClassVar[int] = 8
    version: ClassVar[int] = 2
    bits: ClassVar[int] = 1

    block: int = Field(default=1024, ge=16, le=65_536, multiple_of=8, description="values that share a scale")

    def make_encoder(self, values: Floats) -> BlockEncoder:
        return partial(_encode_signs, self.block)

    def codes_to_multiples(self, codes: Integers) -> None:
        _codes_to_signs(codes)


@kernel
def _encode_signs(block: int, values: Floats, first: int, halves: Halves, codes: Integers, subtract: bool) -> bool:
    """Encode blocks, as described at `blocks.BlockEncoder`."""
    sums = np.empty(block, np.float32)
    for block_index in range(halves.size):
        row, out = (
            values[block_index * block : (block_index + 1) * block],
            codes[block_index * block : (block_index + 1) * block],
        )
        scale = round_scale(mean_magnitude(row, sums), ROUND_NEAREST, halves, block_index)
        if scale < 0:
            return False
        for i in range(row.size):
            out[i] = np.int8(row[i] < 0)
        if subtract:
            for i in range(row.size):
                row[i] -= -scale if out[i] else scale
    return True


@kernel
def _codes_to_signs(codes: Integers) -> None:
    for i in range(codes.size):
        codes[i] = np.int8(1) - (codes[i] << np.int8(1))

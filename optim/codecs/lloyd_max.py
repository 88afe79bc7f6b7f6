"""Two bits per value: the levels of Lloyd and Max for normally distributed values (10.1109/TIT.1982.1056489).

    s = 0.18927 * mean |x| of a block;  decoded = 3 s where |x| < 6.5 s, else 10 s, with the sign of x

Of four levels for a normal distribution of deviation d, those at +-0.4528 d and +-1.5104 d, with the border at
0.9816 d, have the least squared error (a relative error of 0.343; the sign alone has 0.60). Their ratio is 10 / 3 to a
thousandth, and a deviation is 1.2533 mean magnitudes. MuLoCo (arXiv 2505.23725) sends two bits too: four bins of equal
width in six deviations, and the mean of each; that has a relative error of 0.40.

The residual is shorter than the block, whatever its values: sum x * decoded is above half of sum decoded^2, because the
values at the outer levels are at least 6.5 s, and all together have a mean magnitude of 5.28 s. A butterfly codes the
mean of the peers once more, without feedback, so two bits want `topology.kind = "gather"`.
"""

from functools import partial
from typing import ClassVar

import numpy as np
from pydantic.dataclasses import dataclass

from optim.codecs.bits.packing import Integers
from optim.codecs.blocks import ROUND_NEAREST, BlockCodec, BlockEncoder, Halves, mean_magnitude, round_scale
from optim.kernels.jit import kernel, subroutine
from optim.kernels.vectors import Floats
from optim.options import STRICT

SCALE = np.float32(0.18927)  # of a mean magnitude
BORDER = np.float32(6.5)  # the rest are units of the scale
INNER, OUTER = np.int8(3), np.int8(10)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BlockLloydMax(BlockCodec):
    kind: ClassVar[str] = "lloyd-max"
    number: ClassVar[int] = 14
    version: ClassVar[int] = 1
    bits: ClassVar[int] = 2

    def make_encoder(self, values: Floats) -> BlockEncoder:
        return partial(_encode_blocks, self.block)

    def codes_to_multiples(self, codes: Integers) -> None:
        _codes_to_multiples(codes)


@kernel
def _encode_blocks(block: int, values: Floats, first: int, halves: Halves, codes: Integers, subtract: bool) -> bool:
    """Encode blocks, as described at `blocks.BlockEncoder`. Bit 0: the outer level; bit 1: negative."""
    sums = np.empty(block, np.float32)
    for block_index in range(halves.size):
        row, out = (
            values[block_index * block : (block_index + 1) * block],
            codes[block_index * block : (block_index + 1) * block],
        )
        scale = round_scale(mean_magnitude(row, sums) * SCALE, ROUND_NEAREST, halves, block_index)
        if scale < 0:
            return False
        border = scale * BORDER
        for i in range(row.size):
            out[i] = np.int8(abs(row[i]) >= border) | np.int8(np.int8(row[i] < 0) << 1)
        if subtract:
            for i in range(row.size):
                row[i] -= np.float32(_code_to_multiple(out[i])) * scale
    return True


@kernel
def _codes_to_multiples(codes: Integers) -> None:
    for i in range(codes.size):
        codes[i] = _code_to_multiple(codes[i])


@subroutine
def _code_to_multiple(code: np.int8) -> np.int8:
    level = OUTER if code & 1 else INNER
    return np.int8(-level) if code & 2 else level

"""The common part of the blockwise codecs: a scale for each block of values, and a few bits for each value.

    decoded = m * s, where m is a small integer that the value's code stands for, and s the block's scale, a bfloat16

The product is exact in fp32: m has at most 7 bits besides its sign, s has 8. So adding it rounds once, whether or not a
processor multiplies and adds in one step, and sums are the same everywhere.

Payload: header, scales (the upper halves of fp32, one per block), the codes of the values. 8-bit codes are bytes. For
4-bit codes the vector is cut in two, the first half as long in blocks as the second or longer by one; byte i has the
code of value i in its low bits and that of value half + i in its high bits. For 1-bit and 2-bit codes, eight or four
neighbours share a byte, the first in the lowest bits. Bits that belong to no value are zero.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass as plain_dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.codecs.base import Codec, Payload, PayloadReader, PayloadWriter
from optim.codecs.bits.deterministic_random import NoiseKey, noise_key
from optim.codecs.bits.magnitudes import MAGNITUDE_LIMIT, max_magnitude_bits
from optim.codecs.bits.packing import Bytes, Integers, Packing, make_packing
from optim.errors import CodecError
from optim.kernels.jit import bits_to_float, float_to_bits, kernel, subroutine
from optim.kernels.parallel import parallel_for, thread_buffer
from optim.kernels.vectors import SLAB_SIZE, Floats, Vector, slabs
from optim.options import STRICT

MIN_SCALE = 2.0**-118  # smaller scales are rounded to zero, so that products stay normal numbers
MIN_SCALE_HALF, SCALE_LIMIT_HALF = (
    np.float32(value).view(np.uint32) >> np.uint32(16) for value in (MIN_SCALE, MAGNITUDE_LIMIT)
)
SCALE_LIMIT, HALF_BITS = np.float32(MAGNITUDE_LIMIT), np.uint32(16)
ROUND_UP, ROUND_NEAREST = (
    np.uint32(0xFFFF),
    np.uint32(0x8000),
)  # added to an fp32 scale before its lower half is cut off
Halves = npt.NDArray[np.uint16]
# Encodes whole blocks from block number `first` on: (values, first, halves, codes, subtract). Writes the codes and
# the upper halves of the scales, and subtracts the decoded values if `subtract`. Returns False if a value is not finite
# or too large.
BlockEncoder = Callable[[Floats, int, Halves, Integers, bool], bool]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BlockCodec(Codec):
    """A codec that scales each block of values."""

    bits: ClassVar[int]  # per value

    block: int = Field(default=256, ge=16, le=65_536, multiple_of=8, description="values that share a scale")

    @property
    def alignment(self) -> int:
        return self.block

    def max_bytes(self, numel: int) -> int:
        return 2 + 2 * self._block_count(numel) + self._make_packing(numel).size

    def encode_array(self, values: Floats, subtract: bool) -> Payload:
        packing = self._make_packing(values.size)
        writer = PayloadWriter(self.header(), 2 * self._block_count(values.size) + packing.size)
        halves, packed = writer.reserve("u2", self._block_count(values.size)), writer.reserve("u1", packing.size)
        encode_blocks = self.make_encoder(values)

        def encode(part: slice) -> None:
            spans, codes = packing.spans(part), packing.code_buffers(packed, part)
            for span, out in zip(spans, codes, strict=True):
                first, blocks = span.start // self.block, self._block_count(out.size)
                if not encode_blocks(values[span], first, halves[first : first + blocks], out, subtract):
                    raise CodecError("a value is not finite or too large")
            packing.pack(packed, part, codes)

        parallel_for(encode, packing.slabs(self.slab_size))
        return writer.payload

    def decode_vector(self, payload: Payload, numel: int) -> "BlockVector":
        reader = self.open_payload(payload, numel)
        scales = read_scales(reader, self._block_count(numel))
        packing = self._make_packing(numel)
        packed: Bytes = reader.read("u1", packing.size)
        reader.expect_end()
        packing.check_padding(packed)
        return BlockVector(numel, self, packing, packed, scales)

    @abstractmethod
    def make_encoder(self, values: Floats) -> BlockEncoder:
        """Return the encoder of all blocks of a contribution, in any order and thread; the last block may be short."""

    @abstractmethod
    def codes_to_multiples(self, codes: Integers) -> None:
        """Convert codes, in place, to the integers that the scale is multiplied by."""

    def _block_count(self, numel: int) -> int:
        return -(-numel // self.block)

    def _make_packing(self, numel: int) -> Packing:
        return make_packing(self.bits, numel, self.block)

    @property
    def slab_size(self) -> int:
        """Return the number of values in as many whole blocks as keep temporaries in the cache."""
        return max(1, SLAB_SIZE // self.block) * self.block


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PeakBlockCodec(BlockCodec):
    """A block codec whose scale is the largest magnitude over `levels`; rounding may be stochastic."""

    levels: ClassVar[int]

    rounding: Literal["nearest", "stochastic"] = "nearest"

    def noise_key(self, values: Floats) -> NoiseKey:
        """Return the key of the noise for a contribution of these values."""
        return noise_key(values, None if self.binding is None else self.binding.round_number)


@plain_dataclass(frozen=True)
class BlockVector(Vector):
    """A blockwise payload, decoded span by span."""

    numel: int
    codec: BlockCodec
    packing: Packing
    packed: Bytes
    scales: Floats

    def decode_slabs(self) -> Iterable[slice]:
        return slabs(self.numel, self.codec.slab_size)

    def decode_into(self, slab: slice, out: Floats) -> None:
        block = self.codec.block
        first = slab.start // block
        whole = slice(first * block, min(-(-slab.stop // block) * block, self.numel))
        values = out if whole == slab else thread_buffer("floats", np.float32, whole.stop - whole.start)
        _write_products(self._decode_multiples(whole), self.scales[first:], block, values)
        if whole != slab:
            out[:] = values[slab.start - whole.start : slab.stop - whole.start]

    def add_to(self, total: Floats, weight: float) -> None:
        """Add m * (weight * s) to `total`, rounding each operation; with weight 1 only the sum is rounded."""
        block, factors = self.codec.block, self.scales * np.float32(weight)

        def add(part: slice) -> None:
            _add_products(self._decode_multiples(part), factors[part.start // block :], block, total[part])

        parallel_for(add, self.decode_slabs())

    def _decode_multiples(self, span: slice) -> Integers:
        """Decode a span of whole blocks to integers."""
        multiples: Integers = thread_buffer("multiples", np.int8, span.stop - span.start)
        self.packing.unpack(self.packed, span, multiples)
        self.codec.codes_to_multiples(multiples)
        return multiples


@kernel
def _add_products(multiples: Integers, scales: Floats, block: int, total: Floats) -> None:
    for block_index in range(-(-total.size // block)):
        row, scale = multiples[block_index * block : (block_index + 1) * block], scales[block_index]
        out = total[block_index * block : (block_index + 1) * block]
        for i in range(row.size):
            out[i] += np.float32(row[i]) * scale


@kernel
def _write_products(multiples: Integers, scales: Floats, block: int, values: Floats) -> None:
    for block_index in range(-(-values.size // block)):
        row, scale = multiples[block_index * block : (block_index + 1) * block], scales[block_index]
        out = values[block_index * block : (block_index + 1) * block]
        for i in range(row.size):
            out[i] = np.float32(row[i]) * scale


@subroutine
def block_peak(row: Floats) -> np.float32:
    """Return max |x|, or a NaN or an infinity if the row has one."""
    return bits_to_float(np.uint32(max_magnitude_bits(row)))


@subroutine
def mean_magnitude(row: Floats, sums: Floats) -> np.float32:
    """Return the mean magnitude, summed in an order that does not depend on the machine.

    The second half is added to the first until one value is left; short blocks are filled up with zeros.
    """
    sums[:] = np.float32(0)
    for i in range(row.size):
        sums[i] = abs(row[i])
    count = sums.size
    while count > 1:
        half = (count + 1) // 2
        above = sums[half:count]
        for i in range(above.size):
            sums[i] += above[i]
        count = half
    return np.float32(sums[0] / np.float32(row.size))


@subroutine
def round_scale(scale: np.float32, round_up: np.uint32, halves: Halves, block_index: int) -> np.float32:
    """Write the upper half of a block's scale and return the scale that it decodes to.

    Returns zero if the scale is too small, and a negative number if it is not finite or too large.
    """
    if not scale < SCALE_LIMIT:
        return np.float32(-1)
    half = np.uint32((float_to_bits(scale) + round_up) >> HALF_BITS)
    halves[block_index] = half if half >= MIN_SCALE_HALF else np.uint32(0)
    return bits_to_float(np.uint32(np.uint32(halves[block_index]) << HALF_BITS))


@subroutine
def inverse_or_zero(scale: np.float32) -> np.float32:
    """Return 1 / scale, or zero for a scale of zero."""
    return np.float32(1) / scale if scale > np.float32(0) else np.float32(0)


def read_scales(reader: PayloadReader, count: int) -> Floats:
    """Read `count` scales of which the payload has the upper halves.

    Raises:
        CodecError: `round_scale` would not write such a scale.
    """
    halves: Halves = reader.read("u2", count)
    # As integers: a sign bit, an infinity and a NaN all lie above every bfloat16 from +0 to the limit.
    if halves.max() > SCALE_LIMIT_HALF or (halves[halves > 0] < MIN_SCALE_HALF).any():
        raise CodecError("a scale is negative, not finite, too large or too small")
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)

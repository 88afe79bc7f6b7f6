"""The dense codecs in plain operations on whole arrays: slow references that the compiled kernels must agree with."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from optim.codecs.bits.deterministic_random import NoiseKey, noise_key
from optim.codecs.blocks import MIN_SCALE, ROUND_NEAREST, ROUND_UP, BlockCodec
from optim.codecs.e3m0 import BlockE3M0
from optim.codecs.floats import MIN_EXPONENT as LOWEST_EXPONENT
from optim.codecs.int_blocks import BlockInt4, BlockInt8
from optim.codecs.lloyd_max import BlockLloydMax
from optim.codecs.sign import BlockSign
from optim.kernels.vectors import Floats

Codes = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Encoded:
    payload: bytes
    multiples: Floats  # of each value
    scales: Floats  # of each value

    def decode(self, weight: float = 1.0) -> Floats:
        return self.multiples * (self.scales * np.float32(weight))


def encode_float16(values: Floats) -> Encoded:
    largest = np.abs(values).max()
    exponent = max(LOWEST_EXPONENT, int(np.frexp(largest)[1]) - 15) if largest else 0
    halves = (values * np.float32(2.0**-exponent)).astype("<f2")
    header = bytes((2, 1)) + np.int8(exponent).tobytes()
    return Encoded(header + halves.tobytes(), halves.astype(np.float32), np.full_like(values, 2.0**exponent))


def encode_bfloat16(values: Floats) -> Encoded:
    """Round to the nearer neighbour; ties go to the one with an even last bit."""
    bits = values.view(np.uint32)
    below = bits >> 16
    rest = bits & 0xFFFF
    halves = below + ((rest > 0x8000) | ((rest == 0x8000) & (below % 2 == 1)))
    widened = (halves << 16).astype(np.uint32).view(np.float32)
    return Encoded(bytes((5, 1)) + halves.astype("<u2").tobytes(), widened, np.ones_like(values))


def encode_blockwise(codec: BlockCodec, values: Floats) -> Encoded:
    blocks = -(-values.size // codec.block)
    rows = np.pad(values, (0, blocks * codec.block - values.size)).reshape(blocks, codec.block)
    sizes = np.full(blocks, codec.block, np.float32)
    sizes[-1] -= rows.size - values.size
    scales, is_mean = _scales(codec, rows.copy(), sizes), isinstance(codec, BlockSign | BlockLloydMax)
    round_up = ROUND_NEAREST if is_mean else ROUND_UP
    halves = (scales.view(np.uint32) + round_up >> 16).astype("<u2")
    halves[_widen(halves) < MIN_SCALE] = 0
    scales = _widen(halves)
    inverses = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    quotients = (rows * inverses[:, None]).reshape(-1)[: values.size]
    if isinstance(codec, BlockSign):
        codes = (values < 0).astype(np.int64)
        multiples = 1 - 2 * codes
    elif isinstance(codec, BlockLloydMax):
        is_outer = np.abs(values) >= np.repeat(scales * np.float32(6.5), codec.block)[: values.size]
        codes = is_outer + 2 * (values < 0).astype(np.int64)
        multiples = np.where(is_outer, 10, 3) * np.where(values < 0, -1, 1)
    elif isinstance(codec, BlockE3M0):
        codes, multiples = _encode_powers(codec, quotients, noise_words(noise_key(values, None), halves, codec.block))
    else:
        assert isinstance(codec, (BlockInt8, BlockInt4))
        codes = multiples = _encode_integers(
            codec, quotients, noise_words(noise_key(values, None), halves, codec.block)
        )
    payload = bytes((codec.number, codec.version)) + halves.tobytes() + _pack(codec, codes)
    return Encoded(payload, multiples.astype(np.float32), np.repeat(scales, codec.block)[: values.size])


def _widen(halves: npt.NDArray[np.uint16]) -> Floats:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _scales(codec: BlockCodec, rows: Floats, sizes: Floats) -> Floats:
    if not isinstance(codec, BlockSign | BlockLloydMax):
        divisors: dict[type[BlockCodec], int] = {BlockInt8: 127, BlockInt4: 7, BlockE3M0: 64}
        largest: Floats = np.abs(rows).max(1) / np.float32(divisors[type(codec)])
        return largest
    sums = np.abs(rows.T)
    while len(sums) > 1:
        half = -(-len(sums) // 2)
        sums[: len(sums) - half] += sums[half:]
        sums = sums[:half]
    means: Floats = sums[0] / sizes
    return means * np.float32(0.18927) if isinstance(codec, BlockLloydMax) else means


def _encode_integers(codec: BlockInt8 | BlockInt4, quotients: Floats, words: Words) -> Codes:
    if codec.rounding == "nearest":
        return np.rint(quotients).astype(np.int64)
    fractions = (words[: quotients.size] >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
    return np.clip(np.floor(quotients + fractions), -codec.levels, codec.levels).astype(np.int64)


def _encode_powers(codec: BlockE3M0, quotients: Floats, words: Words) -> tuple[Codes, Codes]:
    magnitudes = np.abs(quotients)
    if codec.rounding == "nearest":
        levels = np.searchsorted([0.5, 1.5, 3, 6, 12, 24, 48], magnitudes, side="right")
    else:
        carry = (words[: quotients.size] >> np.uint32(9)).astype(np.int64)
        octaves = (magnitudes.view(np.int32) + carry >> 23) - 126
        lowest = (np.minimum(magnitudes, 1) * 2.0**23).astype(np.int64) + carry >> 23
        levels = np.minimum(np.maximum(octaves, lowest), 7)
    negative = np.signbit(quotients) & (levels > 0)
    multiples = (1 << levels) >> 1
    return levels | negative << 3, np.where(negative, -multiples, multiples)


def noise_words(key: NoiseKey, halves: npt.NDArray[np.uint16], block: int) -> Words:
    """Return one word per value of whole blocks that have these scales."""
    numbers: Words = np.arange(halves.size).astype(np.uint32)
    numbered: Words = _mix_bits(numbers ^ key.low) ^ key.high
    keys = _mix_bits(numbered + halves.astype(np.uint32))
    return _mix_bits(keys[:, None] + np.arange(block).astype(np.uint32)).ravel()


def _mix_bits(words: Words) -> Words:
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    words = (words ^ (words >> np.uint32(15))) * np.uint32(0xD35A2D97)
    return words ^ (words >> np.uint32(15))


def _pack(codec: BlockCodec, codes: Codes) -> bytes:
    if codec.bits == 8:
        return codes.astype(np.int8).tobytes()
    if codec.bits == 2:
        fours = np.pad(codes, (0, -codes.size % 4)).reshape(-1, 4)
        packed: npt.NDArray[np.uint8] = (fours << np.array([0, 2, 4, 6])).sum(1).astype(np.uint8)
        return packed.tobytes()
    if codec.bits == 1:
        return np.packbits(codes.astype(np.uint8), bitorder="little").tobytes()
    blocks = -(-codes.size // codec.block)
    half = -(-blocks // 2) * codec.block
    low, high = codes[:half] & 15, codes[half:] & 15
    low[: high.size] |= high << 4
    return low.astype(np.uint8).tobytes()

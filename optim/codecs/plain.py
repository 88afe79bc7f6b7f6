"""Bits that are sent as they are: the flags of all codes, and the low bits of the gaps between their indices.

Most significant bits first: whether each value is negative; as far as a level's number has them, all low and then all
high bits of the numbers; then each gap's low bits, which tell the members of its class apart.
"""

import numpy as np
import numpy.typing as npt

from optim.codecs.gaps import Gaps
from optim.codecs.kept import Codes
from optim.codecs.rans import Symbols
from optim.compiled import jit

Bytes = npt.NDArray[np.uint8]
Widths = npt.NDArray[np.uint8]  # of a class's low bits

ZERO, ONE = np.uint64(0), np.uint64(1)
BYTE_SHIFT, BIT_MASK = np.uint64(3), np.uint64(7)  # bits of a bit's place in its byte, and the last one
READ_AHEAD_BYTES = 2  # bytes that can be read behind the last: low bits, at most 13, are taken from three


@jit
def count_low_bits(classes: Symbols, widths: Widths) -> int:
    """Low bits of all gaps."""
    bits = 0
    for symbol in classes:
        bits += widths[symbol]
    return bits


@jit
def write_bit_planes(codes: Codes, bits: int, distances: Gaps, classes: Symbols, widths: Widths, packed: Bytes) -> None:
    """To the front of `packed`. `bits`: of a code's flags."""
    pending, filled, byte = 0, 0, 0
    for flag in range(bits):
        plane = (flag + 2) % 3
        for code in codes:
            pending = pending << 1 | code >> plane & 1
            filled += 1
            if filled == 8:
                packed[byte] = pending
                pending, filled, byte = 0, 0, byte + 1
    for place in range(distances.size):
        width = widths[classes[place]]
        pending = pending << width | distances[place] & (1 << width) - 1
        filled += width
        while filled >= 8:
            filled -= 8
            packed[byte] = pending >> filled
            pending, byte = pending & (1 << filled) - 1, byte + 1
    if filled:
        packed[byte] = pending << 8 - filled


@jit
def read_bit_planes(
    packed: Bytes, bits: int, classes: Symbols, lowest: Gaps, widths: Widths, span: int, keep: int, codes: Codes
) -> int:
    """Undo `write`, for chunks with `keep` codes each but the last; how far the last chunk's indices go. Below zero if
    those of another leave it. `BEHIND` bytes behind the last are read."""
    size, bit, index = np.uint64(classes.size), np.uint64(bits * classes.size), -1
    for first in range(np.uint64(0), size, np.uint64(keep)):  # a place that may be negative is looked at each time
        if index >= span:
            return -1
        index = -1
        for place in range(first, min(first + np.uint64(keep), size)):
            symbol = classes[place]
            width = np.uint64(widths[symbol])
            index += 1 + int(lowest[symbol]) + int(_low_bits(packed, bit, width))
            bit += width
            code = np.uint64(index)
            for plane in (2, 1, 0):
                flag = 0 if plane == 2 else plane + 1
                code = code << ONE | (_low_bits(packed, np.uint64(flag) * size + place, ONE) if flag < bits else ZERO)
            codes[place] = np.uint32(code)
    return index


@jit
def _low_bits(packed: Bytes, bit: np.uint64, width: np.uint64) -> np.uint64:
    """So many bits from that one on. For compiled functions alone."""
    byte = bit >> BYTE_SHIFT
    window = np.uint64(packed[byte]) << np.uint64(16) | np.uint64(packed[byte + ONE]) << np.uint64(8)
    window |= np.uint64(packed[byte + ONE + ONE])
    return window >> np.uint64(24) - (bit & BIT_MASK) - width & (ONE << width) - ONE

"""Bits that are sent as they are: the flags of all codes, and the low bits of the gaps between their indices.

Most significant bits first: whether each value is negative; as far as a level's number has them, all low and then all
high bits of the numbers; then each gap's low bits, which tell the members of its class apart.
"""

import numpy as np
import numpy.typing as npt

from optim.codecs.gaps import Gaps
from optim.codecs.kept import Codes
from optim.codecs.rans import Symbols
from optim.compiled import compiled

Bytes = npt.NDArray[np.uint8]
Widths = npt.NDArray[np.uint8]  # of a class's low bits

BEHIND = 2  # bytes that can be read behind the last: low bits, at most 13, are taken from three


@compiled
def count(classes: Symbols, widths: Widths) -> int:
    """Low bits of all gaps."""
    bits = 0
    for symbol in classes:
        bits += widths[symbol]
    return bits


@compiled
def write(codes: Codes, bits: int, gaps: Gaps, classes: Symbols, widths: Widths, packed: Bytes) -> None:
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
    for place in range(gaps.size):
        width = widths[classes[place]]
        pending = pending << width | gaps[place] & (1 << width) - 1
        filled += width
        while filled >= 8:
            filled -= 8
            packed[byte] = pending >> filled
            pending, byte = pending & (1 << filled) - 1, byte + 1
    if filled:
        packed[byte] = pending << 8 - filled


@compiled
def read(
    packed: Bytes, bits: int, classes: Symbols, lowest: Gaps, widths: Widths, span: int, keep: int, codes: Codes
) -> int:
    """Undo `write`, for chunks with `keep` codes each but the last; how far the last chunk's indices go. Below zero if
    those of another leave it. `BEHIND` bytes behind the last are read."""
    bit, place, index = bits * classes.size, 0, -1
    for first in range(0, classes.size, keep):
        if index >= span:
            return -1
        index = -1
        for place in range(first, min(first + keep, classes.size)):
            symbol = classes[place]
            width, byte = widths[symbol], bit >> 3
            window = packed[byte] << 16 | packed[byte + 1] << 8 | packed[byte + 2]
            index += 1 + lowest[symbol] + (window >> 24 - (bit & 7) - width & (1 << width) - 1)
            bit += width
            code = index
            for plane in (2, 1, 0):
                flag = 0 if plane == 2 else plane + 1
                here = flag * classes.size + place
                code = code << 1 | (packed[here >> 3] >> 7 - (here & 7) & 1 if flag < bits else 0)
            codes[place] = code
    return index

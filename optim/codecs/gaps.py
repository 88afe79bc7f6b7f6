"""Gaps between sorted positions as entropy-coded classes and plain low bits.

A gap (0 between neighbours) below 8 is its own class; above, each octave is cut into four classes of equal width,
whose members are told apart by plain bits. With the mean gap fixed, no distribution has more entropy than the geometric
one, which is within 2.3 % of log2 C(n, k) for k >= 16 of n = 4096: the frequencies of the classes, counted over the
payload, therefore bring any set of positions, clustered or not, close to that bound or below it. Uniformly drawn
positions need no table of frequencies: of the subsets of n positions, C(n - a, k) begin with a gap of at least a.
"""

from functools import lru_cache
from math import comb

import numpy as np
import numpy.typing as npt

from optim.codecs.rans import TOTAL, Frequencies, Symbols, normalized
from optim.errors import CodecError
from optim.threads import each
from optim.vectors import AT_ONCE, slabs

Gaps = npt.NDArray[np.uint16]
Bits = npt.NDArray[np.uint8]  # one bit an element
Ends = npt.NDArray[np.int64]

DIRECT = 8  # gaps that are their own class
OCTAVE = 4  # classes in each octave above


def class_of(gaps: Gaps) -> Symbols:
    """The class of each gap below 2^16."""
    exponent = np.frexp(np.maximum(gaps, DIRECT).astype(np.float32))[1].astype(np.int32) - 3
    return np.where(gaps < DIRECT, gaps, (OCTAVE * exponent + (gaps >> exponent))).astype(np.uint8)


@lru_cache(maxsize=16)
def class_table(span: int) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint8]]:
    """The lowest gap and the number of plain bits of each class, for gaps below `span`."""
    widths = [0] * DIRECT
    lowest = list(range(DIRECT))
    while lowest[-1] + (1 << widths[-1]) < span:
        lowest.append(lowest[-1] + (1 << widths[-1]))
        widths.append((len(lowest) - 1 - DIRECT) // OCTAVE + 1)
    return np.array(lowest, np.uint16), np.array(widths, np.uint8)


@lru_cache(maxsize=16)
def uniform_frequencies(span: int, keep: int) -> Frequencies:
    """Of the first gap in a subset of `keep` of `span` positions; at least one for every class that can occur."""
    lowest = class_table(span)[0].tolist()
    at_least = [comb(max(0, span - first), keep) for first in lowest] + [0]
    counts = [at_least[i] - at_least[i + 1] for i in range(len(lowest))]
    scaled = np.array([-(-count * TOTAL * 1024 // at_least[0]) for count in counts], np.int64)
    return normalized(scaled)


def plain_bits(gaps: Gaps, classes: Symbols, span: int) -> Bits:
    """The low bits of all gaps, one gap after the other, most significant bit first."""
    widths = class_table(span)[1].astype(np.uint32).take(classes, mode="clip")
    ends = plain_ends(classes, span)
    starts = ends - widths
    # A gap has at most 13 low bits: they lie in the 24 from their first byte on. No two gaps share a bit, so that the
    # sum of all windows which begin with a byte has the bits of each.
    low = gaps & (np.uint32(1) << widths) - np.uint32(1)
    windows = low << np.uint32(24) - (starts & 7).astype(np.uint32) - widths
    sums = np.bincount(starts >> 3, weights=windows, minlength=-(-int(ends[-1]) // 8) + 2).astype(np.uint32)
    packed = (sums >> np.uint32(16)).astype(np.uint8)
    packed[1:] |= (sums[:-1] >> np.uint32(8)).astype(np.uint8)
    packed[2:] |= sums[:-2].astype(np.uint8)
    return np.unpackbits(packed, count=int(ends[-1]))


def plain_ends(classes: Symbols, span: int) -> Ends:
    """Of each gap's low bits, where they stop."""
    widths = class_table(span)[1].astype(np.int64)
    ends = widths.take(classes, mode="clip")
    return np.cumsum(ends, out=ends)


def from_classes(classes: Symbols, ends: Ends, packed: npt.NDArray[np.uint8], first: int, span: int) -> Gaps:
    """The gaps; the low bits stand in `packed` bytes from bit `first` on, until their `plain_ends`."""
    lowest, widths = class_table(span)
    # The 24 bits from each byte on: a gap has at most 13 low bits, which end less than a byte before the window does.
    padded = np.concatenate([np.zeros(2, np.uint8), packed, np.zeros(1, np.uint8)]).astype(np.uint32)
    windows = padded[:-2] << np.uint32(16)
    windows |= padded[1:-1] << np.uint32(8)
    windows |= padded[2:]
    masks = (np.uint32(1) << widths.astype(np.uint32)) - np.uint32(1)
    gaps = np.empty(classes.size, np.uint16)

    def decode(part: slice) -> None:
        stop = ends[part] + first
        low = windows.take(stop >> 3, mode="clip")
        stop &= 7
        low >>= np.uint32(8) - stop.astype(np.uint32)
        low &= masks.take(classes[part], mode="clip")
        np.add(lowest.take(classes[part], mode="clip"), low, out=gaps[part], casting="unsafe")

    each(decode, slabs(classes.size, AT_ONCE))
    return gaps


def check_frequencies(frequencies: Frequencies) -> None:
    if frequencies.sum(dtype=np.int64) != TOTAL:
        raise CodecError("frequencies do not sum to the total")

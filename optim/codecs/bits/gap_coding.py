"""Gaps between sorted positions as entropy-coded classes and plain low bits.

A gap (0 between neighbours) below 8 is its own class; above, each octave is cut into four classes of equal width, whose
members differ by plain bits. Among distributions with the same mean gap the geometric one has the most entropy,
and it is within 2.3 % of log2 C(n, k) for k >= 16 of n = 4096. Therefore the frequencies of the classes, counted over
the payload, bring any set of positions, clustered or not, close to that bound or below it. Uniformly drawn positions
need no table of frequencies: of the subsets of n positions, C(n - a, k) begin with a gap of at least a.
"""

from functools import lru_cache
from math import comb

import numpy as np
import numpy.typing as npt

from optim.codecs.bits.rans import TOTAL, Frequencies, Symbols, normalize_counts
from optim.errors import CodecError
from optim.kernels.jit import kernel

Gaps = npt.NDArray[np.uint16]
Indices = npt.NDArray[np.uint32]
Counts = npt.NDArray[np.int64]

DIRECT_CLASSES = 8  # gaps below it are their own class
CLASSES_PER_OCTAVE = 4  # above DIRECT_CLASSES


def classify_gaps(gaps: Gaps) -> Symbols:
    """Return the class of each gap below 2^16."""
    exponent = np.frexp(np.maximum(gaps, DIRECT_CLASSES).astype(np.float32))[1].astype(np.int32) - 3
    return np.where(gaps < DIRECT_CLASSES, gaps, (CLASSES_PER_OCTAVE * exponent + (gaps >> exponent))).astype(np.uint8)


@lru_cache(maxsize=16)
def class_table(span: int) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint8]]:
    """Return the lowest gap and the number of plain bits of each class, for gaps below `span`."""
    widths = [0] * DIRECT_CLASSES
    lowest = list(range(DIRECT_CLASSES))
    while lowest[-1] + (1 << widths[-1]) < span:
        lowest.append(lowest[-1] + (1 << widths[-1]))
        widths.append((len(lowest) - 1 - DIRECT_CLASSES) // CLASSES_PER_OCTAVE + 1)
    return np.array(lowest, np.uint16), np.array(widths, np.uint8)


@lru_cache(maxsize=16)
def uniform_frequencies(span: int, keep: int) -> Frequencies:
    """Return the frequencies of the first gap of random subsets of `keep` of `span` positions.

    Every class that can occur has at least one.
    """
    lowest = class_table(span)[0].tolist()
    at_least = [comb(max(0, span - first), keep) for first in lowest] + [0]
    counts = [at_least[i] - at_least[i + 1] for i in range(len(lowest))]
    scaled = np.array([-(-count * TOTAL * 1024 // at_least[0]) for count in counts], np.int64)
    return normalize_counts(scaled)


@lru_cache(maxsize=16)
def class_lookup(span: int) -> Symbols:
    """Return the class of each gap below `span`."""
    return classify_gaps(np.arange(span, dtype=np.uint16))


@kernel
def compute_gaps(
    indices: Indices, keep: int, class_of_gap: Symbols, gaps: Gaps, classes: Symbols, counts: Counts
) -> None:
    """Write the gap before each index and its class, and count the classes.

    The indices ascend in chunks of `keep` each, of which the last may have fewer. A gap is the number of positions
    between an index and the one before it in its chunk.
    """
    for first in range(0, indices.size, keep):
        next_index = np.uint32(0)
        for i in range(first, min(first + keep, indices.size)):
            gap = indices[i] - next_index
            next_index = indices[i] + np.uint32(1)
            gaps[i], classes[i] = gap, class_of_gap[gap]
            counts[classes[i]] += 1


def check_frequencies(frequencies: Frequencies) -> None:
    if frequencies.sum(dtype=np.int64) != TOTAL:
        raise CodecError("frequencies do not sum to the total")

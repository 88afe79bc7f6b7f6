"""A chunk's kept magnitudes as one, two or four levels.

The magnitudes, sorted from the largest, are split in two where that gives the least squared error; for four levels each
half is split again in the same way. Each group is sent as its mean.
"""

import numpy as np
import numpy.typing as npt

from optim.codecs.bits.selection import Bits
from optim.kernels.jit import MAGNITUDE_MASK, subroutine
from optim.kernels.vectors import Floats

Doubles = npt.NDArray[np.float64]
Ranks = npt.NDArray[np.int32]
MAX_PAIRWISE = 256  # most magnitudes to rank by comparing all pairs, in many SIMD lanes


@subroutine
def fit_levels(magnitudes: Bits, level_numbers: Bits, levels: Floats) -> None:
    """Write `levels.size` ascending levels, and the level level of each magnitude (at most 2^16 magnitudes)."""
    level_numbers[:] = 0
    if levels.size == 1:
        levels[0] = _mean(magnitudes.view(np.float32))
        return
    ranks = np.empty(magnitudes.size, np.int32)
    rank_descending(magnitudes, ranks)
    sums = _prefix_sums(magnitudes.view(np.float32), ranks)
    edges = np.zeros(levels.size + 1, np.int64)
    _find_edges(sums, edges)
    for edge in edges[1:-1]:
        for i in range(magnitudes.size):
            level_numbers[i] += np.uint32(ranks[i] < edge)
    mean = 0.0
    for level in range(levels.size):
        first, last = edges[levels.size - 1 - level], edges[levels.size - level]
        # An empty group gets the level of the next smaller one, so that levels always ascend.
        mean = max(mean, (sums[last] - sums[first]) / max(last - first, 1))
        levels[level] = mean


@subroutine
def _mean(magnitudes: Floats) -> float:
    """Return the mean in double precision."""
    total = 0.0
    for magnitude in magnitudes:
        total += magnitude
    return total / magnitudes.size


@subroutine
def rank_descending(magnitudes: Bits, ranks: Ranks) -> None:
    """Write the rank of each magnitude, from the largest on; equal ones rank in their order."""
    if magnitudes.size > MAX_PAIRWISE:
        _radix_rank(magnitudes, ranks)
        return
    _count_larger(magnitudes.view(np.int32), ranks)
    total = 0  # a separate loop: inside the counting loop it would prevent vectorization
    for i in range(ranks.size):
        total += int(ranks[i])
    if total < magnitudes.size * (magnitudes.size - 1) // 2:  # less than the sum without ties
        _break_ties(magnitudes, ranks)


@subroutine
def _count_larger(magnitudes: Ranks, ranks: Ranks) -> None:
    """Write the number of larger magnitudes for each.

    They are compared as signed numbers, because older processors compare only these in one step.
    """
    for i in range(magnitudes.size):
        magnitude, larger = magnitudes[i], np.int32(0)
        for other in range(magnitudes.size):
            larger += np.int32(magnitudes[other] > magnitude)
        ranks[i] = larger


@subroutine
def _break_ties(magnitudes: Bits, ranks: Ranks) -> None:
    for i in range(magnitudes.size):
        for other in range(i):
            ranks[i] += np.int32(magnitudes[other] == magnitudes[i])


@subroutine
def _radix_rank(magnitudes: Bits, ranks: Ranks) -> None:
    """Rank by radix sort from the lowest digit; each pass keeps the order of equal digits."""
    order, sorted_order = np.arange(magnitudes.size).astype(np.int32), np.empty(magnitudes.size, np.int32)
    for shift in range(0, 32, 8):
        starts = np.zeros(257, np.int32)
        for magnitude in magnitudes:
            starts[((MAGNITUDE_MASK - magnitude) >> shift & 255) + 1] += 1
        for digit in range(256):
            starts[digit + 1] += starts[digit]
        for i in order:
            digit = (MAGNITUDE_MASK - magnitudes[i]) >> shift & 255
            sorted_order[starts[digit]] = i
            starts[digit] += 1
        order, sorted_order = sorted_order, order
    for rank in range(order.size):
        ranks[order[rank]] = rank


@subroutine
def _prefix_sums(magnitudes: Floats, ranks: Ranks) -> Doubles:
    """Return (size + 1,) sums: item i is the sum of the i largest magnitudes."""
    sums = np.zeros(magnitudes.size + 1)
    for i in range(magnitudes.size):
        sums[ranks[i] + 1] = magnitudes[i]
    for i in range(magnitudes.size):
        sums[i + 1] += sums[i]
    return sums


@subroutine
def _find_edges(sums: Doubles, edges: npt.NDArray[np.int64]) -> None:
    """Write the edges of the groups, from the largest magnitudes on, by halving twice."""
    groups = edges.size - 1
    edges[groups] = sums.size - 1
    step = groups // 2
    while step:
        for group in range(step, groups, 2 * step):
            edges[group] = _find_split(sums, edges[group - step], edges[group + step])
        step //= 2


@subroutine
def _find_split(sums: Doubles, first: int, last: int) -> int:
    """Return where to cut [first, last) in two; the upper group is empty only if all is.

    The least sum of squared errors belongs to the largest sum_g (sum of g)^2 / |g|. `sums[i]` is the sum of the first
    i magnitudes.
    """
    best, cut = -1.0, first
    for i in range(first + 1, last + 1):
        above, below = sums[i] - sums[first], sums[last] - sums[i]
        explained = above * above / (i - first) + below * below / max(last - i, 1)
        if explained > best:
            best, cut = explained, i
    return cut

"""A chunk's kept magnitudes as one, two or four levels.

The magnitudes, from the largest on, are split in two where that leaves the least squared error, and for four levels
each half is split again in the same way; each group is sent as its mean.
"""

import numpy as np
import numpy.typing as npt

from optim.codecs.bits.selection import Bits
from optim.kernels.jit import MAGNITUDE_MASK, subroutine
from optim.kernels.vectors import Floats

Doubles = npt.NDArray[np.float64]
Ranks = npt.NDArray[np.int32]
MAX_PAIRWISE = 256  # are ranked by comparing each with each, in many lanes of a register


@subroutine
def fit_levels(magnitudes: Bits, numbers: Bits, levels: Floats) -> None:
    """Write `levels.size` ascending levels, and of each magnitude (at most 2^16) the number of its level."""
    numbers[:] = 0
    if levels.size == 1:
        levels[0] = _mean(magnitudes.view(np.float32))
        return
    ranks = np.empty(magnitudes.size, np.int32)
    rank_descending(magnitudes, ranks)
    sums = _prefix_sums(magnitudes.view(np.float32), ranks)
    edges = np.zeros(levels.size + 1, np.int64)
    _find_edges(sums, edges)
    for edge in edges[1:-1]:
        for place in range(magnitudes.size):
            numbers[place] += np.uint32(ranks[place] < edge)
    mean = 0.0
    for number in range(levels.size):
        first, last = edges[levels.size - 1 - number], edges[levels.size - number]
        # A group without members counts as the next smaller one's equal, so that levels always ascend.
        mean = max(mean, (sums[last] - sums[first]) / max(last - first, 1))
        levels[number] = mean


@subroutine
def _mean(magnitudes: Floats) -> float:
    """In double precision."""
    total = 0.0
    for magnitude in magnitudes:
        total += magnitude
    return total / magnitudes.size


@subroutine
def rank_descending(magnitudes: Bits, ranks: Ranks) -> None:
    """Write how many come before each, if the largest comes first and of equals the earlier."""
    if magnitudes.size > MAX_PAIRWISE:
        _radix_rank(magnitudes, ranks)
        return
    _count_larger(magnitudes.view(np.int32), ranks)
    total = 0  # in a loop of its own: within the one that counts it keeps those many lanes from being used
    for place in range(ranks.size):
        total += int(ranks[place])
    if total < magnitudes.size * (magnitudes.size - 1) // 2:  # as they were, if no two were equal
        _break_ties(magnitudes, ranks)


@subroutine
def _count_larger(magnitudes: Ranks, ranks: Ranks) -> None:
    """Of numbers with a sign, as older processors compare only such in one step."""
    for place in range(magnitudes.size):
        magnitude, larger = magnitudes[place], np.int32(0)
        for other in range(magnitudes.size):
            larger += np.int32(magnitudes[other] > magnitude)
        ranks[place] = larger


@subroutine
def _break_ties(magnitudes: Bits, ranks: Ranks) -> None:
    for place in range(magnitudes.size):
        for other in range(place):
            ranks[place] += np.int32(magnitudes[other] == magnitudes[place])


@subroutine
def _radix_rank(magnitudes: Bits, ranks: Ranks) -> None:
    """Sorted by one digit after the other, the lowest first; what is equal in one stays in order."""
    order, after = np.arange(magnitudes.size).astype(np.int32), np.empty(magnitudes.size, np.int32)
    for shift in range(0, 32, 8):
        places = np.zeros(257, np.int32)
        for magnitude in magnitudes:
            places[((MAGNITUDE_MASK - magnitude) >> shift & 255) + 1] += 1
        for digit in range(256):
            places[digit + 1] += places[digit]
        for number in order:
            digit = (MAGNITUDE_MASK - magnitudes[number]) >> shift & 255
            after[places[digit]] = number
            places[digit] += 1
        order, after = after, order
    for place in range(order.size):
        ranks[order[place]] = place


@subroutine
def _prefix_sums(magnitudes: Floats, ranks: Ranks) -> Doubles:
    """(size + 1,) of the so many largest."""
    sums = np.zeros(magnitudes.size + 1)
    for place in range(magnitudes.size):
        sums[ranks[place] + 1] = magnitudes[place]
    for place in range(magnitudes.size):
        sums[place + 1] += sums[place]
    return sums


@subroutine
def _find_edges(sums: Doubles, edges: npt.NDArray[np.int64]) -> None:
    """The edges of the groups from the largest magnitudes on: halves of halves."""
    groups = edges.size - 1
    edges[groups] = sums.size - 1
    step = groups // 2
    while step:
        for group in range(step, groups, 2 * step):
            edges[group] = _find_split(sums, edges[group - step], edges[group + step])
        step //= 2


@subroutine
def _find_split(sums: Doubles, first: int, last: int) -> int:
    """Where to cut [first, last) in two, the upper group not empty unless all is.

    The least sum of squared errors comes with the largest sum_g (sum of g)^2 / |g|. `sums[i]`: of the i first.
    """
    best, cut = -1.0, first
    for place in range(first + 1, last + 1):
        above, below = sums[place] - sums[first], sums[last] - sums[place]
        explained = above * above / (place - first) + below * below / max(last - place, 1)
        if explained > best:
            best, cut = explained, place
    return cut

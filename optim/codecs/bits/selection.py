"""The largest magnitudes of a chunk, exactly, in one pass through memory.

Of the maxima of groups, the keep-th largest is a floor: at least `keep` values reach it. With eight times as many
groups as are kept, few more do, and only among those is searched. Of equal magnitudes the earlier is kept, so the
choice is the same everywhere. Magnitudes are compared as integers, which sort as the numbers do and in many lanes of a
register.
"""

import numpy as np
import numpy.typing as npt

from optim.codecs.bits.magnitudes import max_magnitude_bits
from optim.kernels.jit import MAGNITUDE_MASK, subroutine

Bits = npt.NDArray[np.uint32]  # of fp32, or of its magnitude

INFINITY_BITS = np.uint32(0x7F800000)
OCTAVE_BITS = np.uint32(1 << 23)  # from a magnitude to twice as much
GROUPS_PER_KEPT = 8
SIMD_LANES = 32  # what is not a multiple of so many is compared one by one
SPARE_RATIO = 8  # a floor that one value in so many more than needed reach is as good as the highest


@subroutine
def select_largest(chunk: Bits, keep: int, places: Bits, magnitudes: Bits) -> bool:
    """Write the places of the `keep` largest magnitudes, ascending, and those to the front of both arrays, which are as
    long as the chunk. False if a value is not finite."""
    maxima = _group_maxima(chunk, _group_count(chunk.size, keep))
    top = np.uint32(max_magnitude_bits(maxima.view(np.float32)))
    if top >= INFINITY_BITS:
        return False
    floor = _find_threshold(maxima, keep, np.uint32(0), top, keep // SPARE_RATIO)
    found = _collect_above(chunk, maxima, floor, places, magnitudes)
    _keep_largest(keep, floor, top, found, places, magnitudes)
    return True


@subroutine
def _group_count(span: int, keep: int) -> int:
    groups = span
    while groups % 2 == 0 and groups // 2 >= GROUPS_PER_KEPT * keep:
        groups //= 2
    return groups


@subroutine
def _group_maxima(chunk: Bits, groups: int) -> Bits:
    """A group is every groups-th value: the maximum runs along memory, and neighbours fall into different groups."""
    maxima = np.zeros(groups, np.uint32)
    for first in range(0, chunk.size, groups):
        row = chunk[first : first + groups]
        for group in range(groups):
            maxima[group] = max(maxima[group], row[group] & MAGNITUDE_MASK)
    return maxima


@subroutine
def _count_at_least(magnitudes: Bits, floor: np.uint32) -> int:
    count = np.int32(0)
    for place in range(magnitudes.size):
        count += np.int32(magnitudes[place] >= floor)
    return int(count)


@subroutine
def _find_threshold(magnitudes: Bits, keep: int, low: np.uint32, top: np.uint32, spare: int) -> np.uint32:
    """From `low` on, which at least `keep` reach, to one that at most `spare` more do; to the highest if none is. `top`
    is the largest."""
    high, width = np.uint32(top + np.uint32(1)), OCTAVE_BITS
    while (
        high - low > width and _count_at_least(magnitudes, np.uint32(high - width)) < keep
    ):  # they are seldom far apart
        high, width = np.uint32(high - width), np.uint32(width + width)
    low = max(low, np.uint32(high - min(high, width)))
    while low + np.uint32(1) < high:
        middle = np.uint32(low + (high - low) // np.uint32(2))
        count = _count_at_least(magnitudes, middle)
        if count < keep:
            high = middle
            continue
        low = middle
        if count <= keep + spare:
            break
    return low


@subroutine
def _collect_above(chunk: Bits, maxima: Bits, floor: np.uint32, places: Bits, magnitudes: Bits) -> int:
    """Write what reaches the floor to the front of both arrays; how many do. No branches: none could be foretold; and
    places without a sign, as one that may be negative is looked at each time."""
    groups, count = np.empty(maxima.size, np.uint64), np.uint64(0)
    for group in range(maxima.size):
        groups[count] = group
        count += np.uint64(maxima[group] >= floor)
    found = np.uint64(0)
    for first in range(np.uint64(0), np.uint64(chunk.size), np.uint64(maxima.size)):
        for group in groups[:count]:
            place = first + group
            magnitude = chunk[place] & MAGNITUDE_MASK
            places[found], magnitudes[found] = np.uint32(place), magnitude
            found += np.uint64(magnitude >= floor)
    return int(found)


@subroutine
def _keep_largest(keep: int, floor: np.uint32, top: np.uint32, found: int, places: Bits, magnitudes: Bits) -> None:
    """Move the `keep` largest of those `found` to the front."""
    whole = min(-(-found // SIMD_LANES) * SIMD_LANES, magnitudes.size)
    magnitudes[found:whole] = 0
    floor = _find_threshold(magnitudes[:whole], keep, floor, top, 0)
    equals = keep - _count_at_least(magnitudes[:whole], floor + np.uint32(1))
    kept = 0
    for place in range(found):
        magnitude = magnitudes[place]
        places[kept], magnitudes[kept] = places[place], magnitude
        equal = magnitude == floor and equals > 0
        equals -= equal
        kept += magnitude > floor or equal
        if kept == keep:
            break

"""The largest magnitudes of a chunk, exactly, in one pass through memory.

The keep-th largest of the maxima of groups is a floor that at least `keep` values reach. With eight times as many
groups as kept values, few more values reach it, and only these are searched. Of equal magnitudes the earlier is kept,
so that the choice is the same everywhere. Magnitudes are compared as integers, which sort as the numbers do and fit
many lanes of a register.
"""

import numpy as np
import numpy.typing as npt

from optim.codecs.bits.magnitudes import max_magnitude_bits
from optim.kernels.jit import MAGNITUDE_MASK, subroutine

Bits = npt.NDArray[np.uint32]  # of fp32 values, or of their magnitudes

INFINITY_BITS = np.uint32(0x7F800000)
OCTAVE_BITS = np.uint32(1 << 23)  # doubles a magnitude when it is added
GROUPS_PER_KEPT = 8
SIMD_LANES = 32  # items beyond a multiple of it are compared one by one
SPARE_RATIO = 8  # a floor is good enough if at most keep // SPARE_RATIO groups too many reach it


@subroutine
def select_largest(chunk: Bits, keep: int, positions: Bits, magnitudes: Bits) -> bool:
    """Write the positions of the `keep` largest magnitudes, ascending, and the magnitudes to the front of both arrays.

    The arrays are as long as the chunk. Returns False if a value is not finite.
    """
    maxima = _group_maxima(chunk, _group_count(chunk.size, keep))
    top = np.uint32(max_magnitude_bits(maxima.view(np.float32)))
    if top >= INFINITY_BITS:
        return False
    floor = _find_threshold(maxima, keep, np.uint32(0), top, keep // SPARE_RATIO)
    found = _collect_above(chunk, maxima, floor, positions, magnitudes)
    _keep_largest(keep, floor, top, found, positions, magnitudes)
    return True


@subroutine
def _group_count(span: int, keep: int) -> int:
    groups = span
    while groups % 2 == 0 and groups // 2 >= GROUPS_PER_KEPT * keep:
        groups //= 2
    return groups


@subroutine
def _group_maxima(chunk: Bits, groups: int) -> Bits:
    """Return the maximum of each group. A group consists of every groups-th value.

    So the maximum runs along memory, and neighbours belong to different groups.
    """
    maxima = np.zeros(groups, np.uint32)
    for first in range(0, chunk.size, groups):
        row = chunk[first : first + groups]
        for group in range(groups):
            maxima[group] = max(maxima[group], row[group] & MAGNITUDE_MASK)
    return maxima


@subroutine
def _count_at_least(magnitudes: Bits, floor: np.uint32) -> int:
    count = np.int32(0)
    for i in range(magnitudes.size):
        count += np.int32(magnitudes[i] >= floor)
    return int(count)


@subroutine
def _find_threshold(magnitudes: Bits, keep: int, low: np.uint32, top: np.uint32, spare: int) -> np.uint32:
    """Return the highest threshold that at least `keep` magnitudes reach, or any that at most `spare` more reach.

    At least `keep` reach `low`; `top` is the largest magnitude.
    """
    high, width = np.uint32(top + np.uint32(1)), OCTAVE_BITS
    while (
        high - low > width and _count_at_least(magnitudes, np.uint32(high - width)) < keep
    ):  # the threshold is usually close to the top
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
def _collect_above(chunk: Bits, maxima: Bits, floor: np.uint32, positions: Bits, magnitudes: Bits) -> int:
    """Write the values that reach the floor to the front of both arrays, and return their number.

    There are no branches, because none could be predicted, and positions are unsigned, because signed ones would be
    checked for negative values each time.
    """
    groups, count = np.empty(maxima.size, np.uint64), np.uint64(0)
    for group in range(maxima.size):
        groups[count] = group
        count += np.uint64(maxima[group] >= floor)
    found = np.uint64(0)
    for first in range(np.uint64(0), np.uint64(chunk.size), np.uint64(maxima.size)):
        for group in groups[:count]:
            position = first + group
            magnitude = chunk[position] & MAGNITUDE_MASK
            positions[found], magnitudes[found] = np.uint32(position), magnitude
            found += np.uint64(magnitude >= floor)
    return int(found)


@subroutine
def _keep_largest(keep: int, floor: np.uint32, top: np.uint32, found: int, positions: Bits, magnitudes: Bits) -> None:
    """Move the `keep` largest of the first `found` values to the front."""
    whole = min(-(-found // SIMD_LANES) * SIMD_LANES, magnitudes.size)
    magnitudes[found:whole] = 0
    floor = _find_threshold(magnitudes[:whole], keep, floor, top, 0)
    equals = keep - _count_at_least(magnitudes[:whole], floor + np.uint32(1))
    kept = 0
    for i in range(found):
        magnitude = magnitudes[i]
        positions[kept], magnitudes[kept] = positions[i], magnitude
        equal = magnitude == floor and equals > 0
        equals -= equal
        kept += magnitude > floor or equal
        if kept == keep:
            break

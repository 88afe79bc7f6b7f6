"""The largest magnitudes of each chunk, exactly, in little more than two passes over memory.

Of the maxima of groups, the keep-th largest is a floor: at least `keep` values reach it. With four times as many groups
as are kept, few more do, and only those are sorted. Of equal magnitudes the earlier is kept, so the choice is the same
everywhere.
"""

import numpy as np
import numpy.typing as npt

from optim.errors import CodecError
from optim.vectors import Floats

MAGNITUDE = np.uint32(0x7FFFFFFF)  # of an fp32; as integers, magnitudes sort as they do as numbers
INFINITY = np.uint32(0x7F800000)
INDEX_BITS = np.uint64(16)
CHUNK_SHIFT = np.uint64(47)
GROUPS_PER_KEPT = 4


def largest(chunks: Floats, keep: int) -> tuple[npt.NDArray[np.uint32], Floats]:
    """The indices within each chunk and the magnitudes, both (count, keep), magnitudes descending.

    `chunks` is (count, span), span at most 2^16, count below 2^16. CodecError if a value is not finite.
    """
    magnitudes = chunks.view(np.uint32) & MAGNITUDE
    floor = _floor(magnitudes, keep)
    position = _places(magnitudes >= floor[:, None])
    chunk, index = np.divmod(position.astype(np.uint64), np.uint64(chunks.shape[1]))
    # Sorting these keys sorts by chunk, then by falling magnitude, then by index.
    inverse = (MAGNITUDE - magnitudes.ravel()[position]).astype(np.uint64)
    keys = chunk << CHUNK_SHIFT | inverse << INDEX_BITS | index
    keys.sort()
    first = np.searchsorted(keys, np.arange(len(chunks), dtype=np.uint64) << CHUNK_SHIFT)
    kept = keys[first[:, None] + np.arange(keep)]
    indices = (kept & np.uint64(0xFFFF)).astype(np.uint32)
    return indices, (MAGNITUDE - (kept >> INDEX_BITS).astype(np.uint32) & MAGNITUDE).view(np.float32)


def _places(marked: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """As `flatnonzero`: first which eights have any mark, as few have."""
    if marked.size % 8:
        return np.flatnonzero(marked)
    words = marked.ravel().view(np.uint64)
    eights = np.flatnonzero(words != 0)
    found = np.flatnonzero(words.take(eights).view(np.bool_))
    places: npt.NDArray[np.int64] = eights[found >> 3] * 8 + (found & 7)
    return places


def _floor(magnitudes: npt.NDArray[np.uint32], keep: int) -> npt.NDArray[np.uint32]:
    """A magnitude that at least `keep` values of each chunk reach."""
    count, span = magnitudes.shape
    groups = span
    while groups % 2 == 0 and groups // 2 >= GROUPS_PER_KEPT * keep:
        groups //= 2
    # A group is every groups-th value: the maximum then runs along memory, and neighbours fall into different groups.
    maxima = magnitudes.reshape(count, span // groups, groups).max(axis=1)
    if maxima.max() >= INFINITY:
        raise CodecError("values to encode are not finite")
    floor: npt.NDArray[np.uint32] = np.partition(maxima, groups - keep, axis=1)[:, groups - keep]
    return floor

"""A chunk's kept magnitudes as one, two or four levels.

The magnitudes are split in two where that leaves the least squared error, and for four levels each half is split again
in the same way; each group is sent as its mean.
"""

import numpy as np
import numpy.typing as npt

from optim.vectors import Floats

Doubles = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


def fit(magnitudes: Floats, count: int) -> tuple[npt.NDArray[np.uint32], Floats]:
    """For rows of descending magnitudes: each one's level (0: the smallest), and (rows, count) ascending levels."""
    rows, keep = magnitudes.shape
    sums = np.zeros((rows, keep + 1))
    np.cumsum(magnitudes, axis=1, dtype=np.float64, out=sums[:, 1:])
    edges = [np.zeros(rows, np.int64), np.full(rows, keep)]
    while len(edges) <= count:
        middles = [_split(sums, first, last) for first, last in zip(edges[:-1], edges[1:], strict=True)]
        edges = [edge for pair in zip(edges[:-1], middles, strict=True) for edge in pair] + edges[-1:]
    at_edges = np.take_along_axis(sums, np.stack(edges, axis=1), axis=1)
    sizes = np.diff(np.stack(edges, axis=1), axis=1)
    means = np.maximum(np.diff(at_edges, axis=1) / np.maximum(sizes, 1), 0)
    # A group without members counts as the next smaller one's equal, so that levels always ascend.
    ascending = np.maximum.accumulate(means[:, ::-1], axis=1).astype(np.float32)
    place = np.arange(keep)
    level = sum((place < edge[:, None] for edge in edges[1:-1]), np.zeros((rows, keep), np.uint32))
    return level.astype(np.uint32), ascending


def _split(sums: Doubles, first: Counts, last: Counts) -> Counts:
    """Where to cut [first, last) in two, the upper group not empty unless all is.

    The least sum of squared errors comes with the largest sum_g (sum of g)^2 / |g|. `sums[:, i]`: of the i first.
    """
    rows, count = np.arange(len(sums)), sums.shape[1]
    cut = np.arange(count)
    above, below = cut - first[:, None], last[:, None] - cut
    start, stop = sums[rows, first][:, None], sums[rows, last][:, None]
    explained = (sums - start) ** 2 / np.maximum(above, 1) + (stop - sums) ** 2 / np.maximum(below, 1)
    explained[(above < 1) | (below < 0)] = -1
    cuts: Counts = np.maximum(explained.argmax(axis=1), first)
    return cuts

"""Draw the windows of a mixture: choose the source of each window, and read the windows of all sources in one order.

Window i of a peer is from the source in whose part of a circle the point u + i * phi lies, where phi is the golden
ratio, u follows from the peer's key, and each part is as long as the share of its source. Such points fill the circle
evenly, so the shares of any few hundred neighbouring windows are near the weights. The source of a window depends on
its number and the weights alone, so the weights may change at any window.

A position is one integer: the number of the next window, and above its 64 bits 128 for each source, which hold the
place of a source without random access.
"""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from node.data.corpus import SourceText, TokenIds, WindowNumbers, WindowStream
from node.data.source_faults import name_source_faults
from protocol.manifest.sections import NUMBER_BITS, PLACE_BITS

CIRCLE = 1 << NUMBER_BITS
GOLDEN_STEP = 0x9E3779B97F4A7C15  # CIRCLE times the golden ratio, without its whole part


def choose_sources(numbers: WindowNumbers, key: int, weights: Sequence[float]) -> npt.NDArray[np.int64]:
    """Return the index of the source of each window; a source without weight gets none."""
    drawn = [index for index, weight in enumerate(weights) if weight]
    total, end, ends = sum(map(Fraction, weights)), Fraction(0), list[int]()
    for index in drawn[:-1]:
        end += Fraction(weights[index])
        ends.append(int(end / total * CIRCLE))
    points = np.uint64(key % CIRCLE) + numbers * np.uint64(GOLDEN_STEP)  # arrays of uint64 wrap around
    parts = np.searchsorted(np.array(ends, dtype=np.uint64), points, side="right")
    return np.array(drawn, dtype=np.int64)[parts]


class MixedWindows:
    """One peer's endless sequence of windows.

    Args:
        keys: 128-bit keys of the peer's order, one for each source.
        weights: of the sources.
    """

    def __init__(
        self,
        sources: Sequence[SourceText],
        context: int,
        keys: Sequence[int],
        weights: tuple[float, ...],
        position: int,
    ) -> None:
        self._sources = sources
        self._context = context
        self._keys = keys
        places, self._number = divmod(position, CIRCLE)
        self._places = [places >> PLACE_BITS * index & (1 << PLACE_BITS) - 1 for index in range(len(sources))]
        self._streams: dict[int, WindowStream] = {}  # by index of the source
        self.weights = weights

    @property
    def weights(self) -> tuple[float, ...]:
        """Return the weights of the sources, which may change between two windows."""
        return self._weights

    @weights.setter
    def weights(self, weights: tuple[float, ...]) -> None:
        self._weights = weights
        for index in np.flatnonzero(weights):
            self._open(int(index))

    @property
    def position(self) -> int:
        """Return the position of the next window."""
        for index, stream in self._streams.items():
            self._places[index] = stream.place
        return self._number + CIRCLE * sum(place << PLACE_BITS * index for index, place in enumerate(self._places))

    def take(self, count: int) -> tuple[TokenIds, npt.NDArray[np.int64]]:
        """Read the next windows, shape (count, context + 1); return them and the indices of their sources (count,)."""
        numbers = np.arange(self._number, self._number + count, dtype=np.uint64)
        chosen = choose_sources(numbers, self._keys[0], self._weights)
        windows = np.empty((count, self._context + 1), dtype=np.int64)
        for index in np.unique(chosen):
            with name_source_faults(self._sources[index].config):
                windows[chosen == index] = self._streams[int(index)].take(numbers[chosen == index])
        self._number += count
        return windows, chosen

    def _open(self, index: int) -> None:
        if index not in self._streams:
            source = self._sources[index]
            with name_source_faults(source.config):
                self._streams[index] = source.training.windows(self._context, self._keys[index], self._places[index])

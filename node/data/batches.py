"""Training batches in the order of one peer, and the validation batches of all peers.

The run's seed and the peer id determine the order: two peers read different windows, and one peer reads the same
windows again from the same position. The validation windows are the same for all peers.

Window i of a peer comes from the source in whose part of a circle the point u + i * phi lies. Here phi is the golden
ratio, u follows from the peer's key, and the length of each part is the share of its source. Such points fill the
circle evenly, so any few hundred consecutive windows have nearly the shares of the weights. The source of a window
depends only on its number and the weights, so the weights may change at any window.

A position is one integer: the number of the next window in the lowest 64 bits, and above them 128 bits for each source,
which hold the place of a source without random access.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from node.data.corpus import UNCOUNTED, Corpus, SourceText, TokenIds, WindowNumbers, WindowStream
from node.data.skipped_rows import Fault, RowPass, name_source_faults
from protocol.manifest.sections import NUMBER_BITS, PLACE_BITS

CIRCLE = 1 << NUMBER_BITS
GOLDEN_STEP = 0x9E3779B97F4A7C15  # CIRCLE times the golden ratio, without its whole part
IGNORED = -100  # a target that does not count, as in torch
VALIDATION_SEQUENCES = 16
VALIDATION_TOKENS = 16_384  # of the loss that a node measures while it trains
Selection = npt.NDArray[np.bool_]


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


class BatchReader:
    """The endless sequence of one peer's batches. The trainer keeps `position` in its snapshot."""

    def __init__(self, corpus: Corpus, context: int, seed: int, peer_id: str, position: int = 0) -> None:
        self._corpus, self._context = corpus, context
        self._keys = tuple(order_key(seed, peer_id, source.config.name) for source in corpus.sources)
        self._weights = corpus.weights
        self.seek(position)
        self._passes = [RowPass(corpus.skip_log) for _ in corpus.sources]

    @property
    def weights(self) -> tuple[float, ...]:
        """Return the weights of the sources, which may change between two batches."""
        return self._weights

    @weights.setter
    def weights(self, weights: tuple[float, ...]) -> None:
        self._weights = self._windows.weights = weights

    @property
    def position(self) -> int:
        """Return the start of the next batch, from which another reader can continue."""
        return self._windows.position

    def seek(self, position: int) -> None:
        """Continue at another position; from a mere number of windows, a source without random access begins again."""
        self._windows = MixedWindows(self._corpus.sources, self._context, self._keys, self._weights, position)

    def next_batch(self, sequences: int) -> Tensor:
        """Read the next batch of tokens: (sequences, context + 1), int64, some perhaps with the bit `UNCOUNTED`."""
        windows = self._take_usable(sequences)
        while len(windows) < sequences:
            windows = np.concatenate([windows, self._take_usable(sequences - len(windows))])
        return torch.from_numpy(windows)

    def _take_usable(self, count: int) -> TokenIds:
        """Read windows, and skip those with an id above the vocabulary."""
        windows, chosen = self._windows.take(count)
        is_usable = np.empty(count, dtype=bool)
        for index in np.unique(chosen):
            is_usable[chosen == index] = self._find_usable(index, windows[chosen == index])
        usable: TokenIds = windows[is_usable]
        return usable

    def _find_usable(self, index: int, windows: TokenIds) -> Selection:
        source = self._corpus.sources[index]
        with name_source_faults(source.config):
            return find_usable(windows, source.vocabulary_size, self._passes[index], "training text")


def find_usable(windows: TokenIds, vocabulary_size: int, row_pass: RowPass, part: str) -> Selection:
    """Return which windows have no id above the vocabulary.

    On an accelerator such an id would kill the process without a message.
    """
    highest = (windows & (UNCOUNTED - 1)).max(axis=1)
    is_usable: Selection = highest < vocabulary_size
    row_pass.keep(int(is_usable.sum()))
    for token in highest[~is_usable]:
        text = f"token id {token} in the text, above {vocabulary_size - 1}; tokenize it again"
        row_pass.skip(part, "", Fault("id above vocabulary", text))
    return is_usable


def order_key(seed: int, peer_id: str, source: str = "") -> int:
    """Return the 128-bit key of the order in which this peer reads a source, by its name."""
    text = f"murmur order 1 {seed} {peer_id} {source}".rstrip()
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")


def inputs_and_targets(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Return token ids and targets (B, T) of windows (B, T + 1); a target that does not count is `IGNORED`."""
    tokens = windows & (UNCOUNTED - 1)
    return tokens[:, :-1], torch.where(windows[:, 1:] < UNCOUNTED, tokens[:, 1:], IGNORED)


def count_targets(windows: Tensor) -> int:
    """Return how many targets of windows (B, T + 1) count."""
    return int((windows[:, 1:] < UNCOUNTED).sum())


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out windows of one source: batches (<= 16, context + 1) of int64. `name` is that of the source."""

    name: str
    weight: float
    batches: tuple[Tensor, ...]


def validation_sets(corpus: Corpus, context: int, max_tokens: int) -> tuple[HeldOut, ...]:
    """Return windows spread evenly over the held-out text of each source, with at most `max_tokens` targets together.

    They are the same for all peers. Weights are those with which the run begins.
    """
    share = max_tokens // len(corpus.sources)
    return tuple(_held_out_windows(corpus, source, context, share) for source in corpus.sources)


def validation_batches(corpus: Corpus, context: int, max_tokens: int) -> list[Tensor]:
    """Return the batches of all sources."""
    return [batch for held in validation_sets(corpus, context, max_tokens) for batch in held.batches]


def _held_out_windows(corpus: Corpus, source: SourceText, context: int, max_tokens: int) -> HeldOut:
    row_pass = RowPass(corpus.skip_log)
    with name_source_faults(source.config):
        windows = source.validation.spread(context, max_tokens)
        usable = windows[find_usable(windows, source.vocabulary_size, row_pass, "held-out text")]
        row_pass.finish()
    batches = torch.split(torch.from_numpy(usable), VALIDATION_SEQUENCES)
    return HeldOut(source.config.name, source.config.weight, tuple(batches))

"""What every source of text becomes: something to train on, a fixed held-out part, and the number of token ids.

A window is `context + 1` tokens: the inputs and, one further on, the targets.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from protocol.errors import DataError

TokenIds = npt.NDArray[np.int64]
Shard = npt.NDArray[np.unsignedinteger[Any]]


class WindowStream(Protocol):
    """A peer's endless order of windows; the same position is followed by the same windows, on every machine."""

    @property
    def position(self) -> int:
        """Where the next window starts; its meaning is the source's own."""

    def take(self, count: int) -> TokenIds:
        """The next windows, shape (count, context + 1)."""


class TrainingText(Protocol):
    """Text to train on."""

    def windows(self, context: int, key: int, position: int) -> WindowStream:
        """The order that `key` (128 bits) stands for, from `position` on; 0 is its beginning."""


class TokenArray:
    """Tokens at random access: shards (each 1-D, in memory or memory-mapped) read as one long row."""

    def __init__(self, shards: list[Shard]) -> None:
        self._shards = [shard for shard in shards if len(shard)]
        self._ends = np.cumsum([len(shard) for shard in self._shards], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, length: int) -> TokenIds:
        """`length` tokens from `start` on; the caller stays inside."""
        out = np.empty(length, dtype=np.int64)
        filled, index = 0, int(np.searchsorted(self._ends, start, side="right"))
        while filled < length:
            shard = self._shards[index]
            offset = start + filled - (int(self._ends[index]) - len(shard))
            piece = shard[offset : offset + length - filled]
            out[filled : filled + len(piece)] = piece
            filled, index = filled + len(piece), index + 1
        return out

    def slice(self, start: int, stop: int) -> "TokenArray":
        """The tokens from `start` to `stop`, not copied."""
        starts = [int(end) - len(shard) for end, shard in zip(self._ends, self._shards, strict=True)]
        return TokenArray(
            [
                shard[max(0, start - first) : max(0, stop - first)]
                for first, shard in zip(starts, self._shards, strict=True)
            ]
        )

    def windows(self, context: int, key: int, position: int) -> "RandomWindows":
        if len(self) <= context:
            raise DataError(f"the training text has {len(self)} tokens, a window {context + 1}; give more text")
        return RandomWindows(self, context, key, position)


class RandomWindows:
    """Window i starts at a place drawn from Philox (Salmon et al., SC 2011) at counter i: any position in no time.

    Position counts windows.
    """

    def __init__(self, tokens: TokenArray, context: int, key: int, position: int) -> None:
        self._tokens = tokens
        self._length = context + 1
        self._key = key
        self._position = position

    @property
    def position(self) -> int:
        return self._position

    def take(self, count: int) -> TokenIds:
        # One step of the counter gives four words; the first of each is used, so windows do not depend on the batch.
        stream = np.random.Philox(key=self._key, counter=self._position)
        words = np.asarray(stream.random_raw(4 * count), dtype=np.uint64)[::4]
        starts = words % np.uint64(len(self._tokens) - self._length + 1)
        self._position += count
        return np.stack([self._tokens.read(int(start), self._length) for start in starts])


@dataclass(frozen=True)
class Corpus:
    """`vocabulary` is the number of token ids that may occur."""

    training: TrainingText
    validation: TokenArray
    vocabulary_size: int

    def require_vocabulary(self, limit: int) -> None:
        """Raises DataError when the model knows fewer token ids than the text may hold."""
        if self.vocabulary_size > limit:
            raise DataError(
                f"the text has {self.vocabulary_size} token ids, the model only {limit}; "
                f"set model.vocabulary to at least {self.vocabulary_size}"
            )


def is_held_out(name: bytes, validation_share: float) -> bool:
    """Whether a file or document is kept for validation: by its own name alone, so all peers agree on each one."""
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") < validation_share * 2**64

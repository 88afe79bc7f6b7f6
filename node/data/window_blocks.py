"""Mix the windows of streamed documents: fill a block with documents, and deliver its windows in random order.

A block ends when it has BLOCK_TOKENS tokens of MIN_BLOCK_DOCUMENTS documents, at MAX_BLOCK_TOKENS, or with an epoch
that it has from the beginning. While a block is delivered, the next one is filled little by little. A place names
the row where the block begins and the number of windows delivered, so a restart reads one block again and continues
with the very next window.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from node.data.corpus import Shard, TokenArray, TokenIds, WindowNumbers, pack, require_training_tokens

BLOCK_TOKENS = 2**22
MAX_BLOCK_TOKENS = 2**25
MIN_BLOCK_DOCUMENTS = 64
FILL_FACTOR = 2  # tokens read into the next block for each token delivered
_INDEX, _ROW, _FILE = 2**24, 2**48, 2**24  # bounds of a window, a place in a file, and a file; an epoch has 2^32


class RowPlace(NamedTuple):
    """A row of a peer's reading order: epoch, number of the file in the epoch's order, place in the file."""

    epoch: int
    file: int
    row: int


class Document(NamedTuple):
    """The tokens of one row, and the place of the next row."""

    tokens: Shard
    next_place: RowPlace


class DocumentStream(Protocol):
    """Documents in the order of a key."""

    def documents(self, key: int, start: RowPlace) -> Iterator[Document]:
        """Yield documents without end from `start` on; one with no tokens marks the end of each epoch."""


@dataclass
class Block:
    """The documents of one block, from the place `start` on."""

    start: RowPlace
    end: RowPlace = field(init=False)
    tokens: int = 0
    is_full: bool = False
    _documents: list[Shard] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.end = self.start

    def fill(self, documents: Iterator[Document], budget: int | None = None) -> None:
        """Read documents until the block is full, or has `budget` more tokens."""
        limit = MAX_BLOCK_TOKENS if budget is None else self.tokens + budget
        while not self.is_full and self.tokens < limit:
            self._add(next(documents))

    def _add(self, document: Document) -> None:
        if len(document.tokens):
            self._documents.append(document.tokens)
            self.tokens += len(document.tokens)
        self.end = document.next_place
        ends_with_epoch = self.start.file == self.start.row == 0 and self.end.epoch > self.start.epoch
        has_enough = self.tokens >= BLOCK_TOKENS and len(self._documents) >= MIN_BLOCK_DOCUMENTS
        self.is_full = has_enough or ends_with_epoch or self.tokens >= MAX_BLOCK_TOKENS

    def windows(self, context: int, key: int, end: Shard | None = None) -> "BlockWindows | PackedWindows":
        """Return the windows of the full block in the order of `key`; with `end` they hold whole conversations."""
        if end is not None:
            return PackedWindows(pack(self._documents, context, end), key, self.start)
        require_training_tokens(self.tokens, context)
        joined = np.concatenate(self._documents)
        return BlockWindows(joined, context, key, self.start)


class BlockWindows:
    """The windows of a block in random order.

    They cover the block as a ring from a random offset on, so every token is a target.
    """

    def __init__(self, tokens: Shard, context: int, key: int, start: RowPlace) -> None:
        self._ring = TokenArray([tokens, tokens])
        self._size = len(tokens)
        self._context = context
        count = -(-self._size // context)
        words = np.random.Philox(key=key, counter=_as_integer(start)).random_raw(count + 1)
        self._offset = int(words[0] % np.uint64(self._size))
        self._order = np.argsort(words[1:], kind="stable")

    def __len__(self) -> int:
        return len(self._order)

    def read(self, index: int) -> TokenIds:
        """Return the window at `index` of the order."""
        start = (self._offset + int(self._order[index]) * self._context) % self._size
        return self._ring.read(start, self._context + 1)


class PackedWindows:
    """The packed windows (n, context + 1) of a block in random order."""

    def __init__(self, windows: Shard, key: int, start: RowPlace) -> None:
        self._windows = windows
        words = np.random.Philox(key=key, counter=_as_integer(start)).random_raw(len(windows))
        self._order = np.argsort(words, kind="stable")

    def __len__(self) -> int:
        return len(self._order)

    def read(self, index: int) -> TokenIds:
        """Return the window at `index` of the order."""
        window: TokenIds = self._windows[self._order[index]].astype(np.int64)
        return window


class BlockStream:
    """One peer's endless sequence of windows, block by block; with `end` they hold whole conversations."""

    def __init__(self, stream: DocumentStream, context: int, key: int, place: int, end: Shard | None = None) -> None:
        self._end = end
        block, self._index = divmod(place, _INDEX)
        start = _from_integer(block)
        self._context = context
        self._key = key
        self._documents = stream.documents(key, start)
        self._next = Block(start)
        self._open_next()

    @property
    def place(self) -> int:
        """Return the start of the block and the number of its windows read, as one integer."""
        if self._index >= len(self._windows):
            return _as_integer(self._next.start) * _INDEX
        return _as_integer(self._start) * _INDEX + self._index

    def take(self, numbers: WindowNumbers) -> TokenIds:
        """Read the next windows, shape (len(numbers), context + 1)."""
        windows = np.stack([self._take_one() for _ in numbers])
        self._next.fill(self._documents, FILL_FACTOR * len(numbers) * self._context)
        return windows

    def _take_one(self) -> TokenIds:
        if self._index >= len(self._windows):
            self._index = 0
            self._open_next()
        self._index += 1
        return self._windows.read(self._index - 1)

    def _open_next(self) -> None:
        self._next.fill(self._documents)
        self._start = self._next.start
        self._windows = self._next.windows(self._context, self._key, self._end)
        self._next = Block(self._next.end)


def _as_integer(place: RowPlace) -> int:
    return (place.epoch * _FILE + place.file) * _ROW + place.row


def _from_integer(number: int) -> RowPlace:
    number, row = divmod(number, _ROW)
    epoch, file = divmod(number, _FILE)
    return RowPlace(epoch, file, row)

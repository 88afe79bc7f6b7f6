"""The common form of every source of text: training text, a fixed held-out part and the number of token ids.

A window is `context + 1` tokens: the inputs, and the targets shifted by one. Ordinary text is cut into windows
anywhere; conversations are packed into them, and tokens outside of answers have the bit `UNCOUNTED`.
"""

import bisect
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt

from node.data.skipped_rows import SkipLog, name_source_faults
from protocol.errors import DataError
from protocol.manifest.sections import SourceSection

FINGERPRINT_WINDOWS = 256
OPEN_WINDOWS: Final = 64  # that take further conversations
UNCOUNTED: Final = 1 << 31  # bit of a token that is read and not learned; ids are below it
TokenIds = npt.NDArray[np.int64]
WindowNumbers = npt.NDArray[np.uint64]
Shard = npt.NDArray[np.unsignedinteger[Any]]


class WindowStream(Protocol):
    """The windows of one source in the order of a key. From one place it is the same on every machine."""

    @property
    def place(self) -> int:
        """Return what the source needs to continue, below 2^128; 0 with random access."""

    def take(self, numbers: WindowNumbers) -> TokenIds:
        """Read the windows of these numbers, shape (len(numbers), context + 1).

        A source without random access reads its next ones.
        """


class TrainingText(Protocol):
    """Text to train on."""

    def windows(self, context: int, key: int, place: int) -> WindowStream:
        """Open the windows of a 128-bit `key` at `place`; 0 is the start."""


class TokenArray:
    """Tokens with random access: 1-D shards, in memory or memory-mapped, read as one sequence."""

    def __init__(self, shards: list[Shard]) -> None:
        self._shards = [shard for shard in shards if len(shard)]
        self._ends = np.cumsum([len(shard) for shard in self._shards], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, length: int) -> TokenIds:
        """Read `length` tokens from `start` on; the caller keeps within the bounds."""
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
        """Return the tokens from `start` to `stop` without copying them."""
        starts = [int(end) - len(shard) for end, shard in zip(self._ends, self._shards, strict=True)]
        return TokenArray(
            [
                shard[max(0, start - first) : max(0, stop - first)]
                for first, shard in zip(starts, self._shards, strict=True)
            ]
        )

    def part(self, number: int, count: int) -> "TokenArray":
        """Return one of `count` equal parts."""
        return self.slice(*(len(self) * edge // count for edge in (number, number + 1)))

    def windows(self, context: int, key: int, place: int) -> "RandomWindows":
        """Open the windows of `key`; raises DataError if the text is shorter than one."""
        require_training_tokens(len(self), context)
        return RandomWindows(self, context, key)

    def spread(self, context: int, max_tokens: int) -> TokenIds:
        """Return windows (n, context + 1) from all over the text. Raises DataError if it is shorter than one."""
        require_held_out_tokens(len(self), context)
        count = min((len(self) - 1) // context, max(1, max_tokens // context))
        starts = [(len(self) - 1 - context) * index // max(1, count - 1) for index in range(count)]
        return np.stack([self.read(start, context + 1) for start in starts])


class PackedText:
    """Conversations with random access, each closed by `end`, which is one token or none: whole ones fill a window."""

    def __init__(self, conversations: Sequence[Shard], end: Shard) -> None:
        self._conversations = conversations
        self._end = end

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def tokens(self) -> TokenArray:
        """Return all conversations in sequence."""
        return TokenArray(list(self._conversations))

    def part(self, number: int, count: int) -> "PackedText":
        """Return one of `count` parts with equally many conversations."""
        first, last = (len(self._conversations) * edge // count for edge in (number, number + 1))
        return PackedText(self._conversations[first:last], self._end)

    def windows(self, context: int, key: int, place: int) -> "RandomWindows":
        """Open the windows of `key`; raises DataError if no conversation has an answer that fits into one."""
        packed = pack(self._conversations, context, self._end)
        return RandomWindows(TokenArray([packed.reshape(-1)]), context, key, stride=context + 1)

    def spread(self, context: int, max_tokens: int) -> TokenIds:
        """Return windows (n, context + 1) from all over the text. Raises DataError if there is none."""
        packed = pack(self._conversations, context, self._end)
        count = min(len(packed), max(1, max_tokens // context))
        return packed[[(len(packed) - 1) * index // max(1, count - 1) for index in range(count)]].astype(np.int64)


def pack(conversations: Iterable[Shard], context: int, end: Shard) -> Shard:
    """Return windows (n, context + 1), uint32, each of which begins with the uncounted `end` and holds whole ones.

    A conversation goes to the open window with the least room that holds it, in the order of the text. One that is
    longer than a window ends with it, and is left out if its window has no answer. Raises DataError if nothing is left.
    """
    windows, open_windows, room = list[list[Shard]](), list[tuple[int, int]](), context + 1 - len(end)
    for conversation in conversations:
        kept = conversation[:room]
        if not (kept < UNCOUNTED).any():
            continue
        place = bisect.bisect_left(open_windows, (len(kept), -1))
        left, number = open_windows.pop(place) if place < len(open_windows) else (room, len(windows))
        if number == len(windows):
            windows.append([end])
        windows[number].append(kept)
        bisect.insort(open_windows, (left - len(kept), number))
        if len(open_windows) > OPEN_WINDOWS:
            del open_windows[0]  # the fullest one
    if not windows:
        raise DataError(f"no conversation has an answer within {context} tokens; give more, or raise model.context")
    packed = np.full(
        (len(windows), context + 1), UNCOUNTED | int(end[0] % UNCOUNTED) if len(end) else UNCOUNTED, np.uint32
    )
    for row, parts in zip(packed, windows, strict=True):
        joined = np.concatenate(parts)
        row[: len(joined)] = joined
    return packed


def require_training_tokens(count: int, context: int) -> None:
    """Raise DataError if the training text is shorter than a window."""
    if count <= context:
        raise DataError(f"the training text has {count} tokens, a window {context + 1}; give more text")


def require_held_out_tokens(count: int, context: int) -> None:
    """Raise DataError if the held-out text is shorter than a window."""
    if count <= context:
        raise DataError(
            f"the held-out text has {count} tokens, a window {context + 1}; "
            "give more text, or raise data.validation_share"
        )


class RandomWindows:
    """Windows at random offsets. Philox (Salmon et al., SC 2011) at counter i draws the offset of window i.

    So every window is reached at once.
    """

    place = 0

    def __init__(self, tokens: TokenArray, context: int, key: int, stride: int = 1) -> None:
        self._tokens = tokens
        self._length = context + 1
        self._key = key
        self._stride = stride  # offsets are its multiples

    def take(self, numbers: WindowNumbers) -> TokenIds:
        """Read the windows of these numbers, shape (len(numbers), context + 1)."""
        if not len(numbers):
            return np.empty((0, self._length), dtype=np.int64)
        first, last = int(numbers.min()), int(numbers.max())
        # One counter step gives four words. Only the first is used, so a window depends on nothing but its number.
        stream = np.random.Philox(key=self._key, counter=first)
        words = np.asarray(stream.random_raw(4 * (last - first + 1)), dtype=np.uint64)[::4]
        places = (len(self._tokens) - self._length) // self._stride + 1
        starts = words[numbers - np.uint64(first)] % np.uint64(places)
        return np.stack([self._tokens.read(int(start) * self._stride, self._length) for start in starts])


@dataclass(frozen=True)
class SourceText:
    """The text of one source, opened. Token ids are below `vocabulary_size`."""

    training: TrainingText
    validation: TokenArray | PackedText
    vocabulary_size: int
    config: SourceSection = SourceSection(source="text")

    def part(self, number: int, count: int) -> Self:
        """Return the source of which only one of `count` equal parts is there to train on."""
        if not isinstance(self.training, TokenArray | PackedText):
            return self
        return replace(self, training=self.training.part(number, count))

    def hash_into(self, hasher: "hashlib._Hash", context: int) -> None:
        """Add a sample of both parts; of a streamed source only the held-out part, as the rest would be downloaded."""
        texts = (part.tokens if isinstance(part, PackedText) else part for part in (self.training, self.validation))
        for part in texts:
            if isinstance(part, TokenArray):
                hasher.update(len(part).to_bytes(8, "big"))
                for start in np.linspace(0, max(0, len(part) - context), FINGERPRINT_WINDOWS, dtype=np.int64):
                    hasher.update(part.read(int(start), min(context, len(part))).tobytes())


@dataclass(frozen=True)
class Corpus:
    """The text of a run: one source, or several that peers mix."""

    sources: tuple[SourceText, ...]
    skip_log: SkipLog = field(default_factory=SkipLog)

    @classmethod
    def of(cls, training: TrainingText, validation: TokenArray, vocabulary_size: int) -> Self:
        """Return the text of a run with a single source."""
        return cls((SourceText(training, validation, vocabulary_size),))

    def part(self, number: int, count: int) -> Self:
        """Return the text of which only one of `count` equal parts is there to train on; streamed text stays whole."""
        return replace(self, sources=tuple(source.part(number, count) for source in self.sources))

    @property
    def weights(self) -> tuple[float, ...]:
        """Return the weights of the sources with which the run begins."""
        return tuple(source.config.weight for source in self.sources)

    @property
    def vocabulary_size(self) -> int:
        """Return a number above every token id."""
        return max(source.vocabulary_size for source in self.sources)

    def fingerprint(self, context: int) -> str:
        """Return the SHA-256 of a sample of all sources, in hexadecimal: equal if two peers have the same text."""
        hasher = hashlib.sha256(f"murmur text {self.vocabulary_size}".encode())
        for source in self.sources:
            source.hash_into(hasher, context)
        return hasher.hexdigest()

    def require_vocabulary(self, limit: int) -> None:
        """Raise DataError if the model has fewer token ids than the text may contain."""
        for source in self.sources:
            with name_source_faults(source.config):
                require_vocabulary(source.vocabulary_size, limit)


def require_vocabulary(size: int, limit: int) -> None:
    """Raise DataError if the model has fewer token ids than the text may contain."""
    if size > limit:
        raise DataError(
            f"the text has {size} token ids, the model only {limit}; set model.vocabulary to at least {size}"
        )


def is_held_out(name: bytes, validation_share: float) -> bool:
    """Return whether a file or document is kept for validation.

    Only its own name decides, so all peers agree on each one.
    """
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") < validation_share * 2**64


def count_held_out(tokens: int, validation_share: float) -> int:
    """Return how many tokens at the end of a single sequence are held out."""
    return max(1, int(tokens * validation_share))

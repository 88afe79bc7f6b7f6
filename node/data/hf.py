"""A Hugging Face data set, streamed through `datasets` (the `hf` extra).

Examples are shuffled by the peer's key (shards, and a buffer of SHUFFLE_BUFFER examples), encoded and read as one
long row. A position is (epoch, example, token of that example) in one integer, so a restart skips to the example and
goes on at the very token. Skipping takes time in proportion to the examples of the epoch.

An example is held out by the hash of its text; the first of them, in the order of the data set, are the validation
text. This is the one source that reads from the network by itself, unless the data set is a local folder.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from node.data.corpus import Corpus, Integers, Shard, TokenArray, held_out
from node.data.vocabulary import Vocabulary
from protocol.errors import DataError, MissingFileError, told
from protocol.manifest import Data

SHUFFLE_BUFFER = 1000
VALIDATION_TOKENS = 2**17
VALIDATION_EXAMPLES = 50_000  # looked at, at most
_FIELD = 2**32  # positions: example below 2**32 of an epoch, token below 2**32 of an example


def open_hf(config: Data, base: Path, vocabulary: Vocabulary) -> Corpus:
    """`config.path` is a folder below `base` if there is one, else the name of a data set on the hub."""
    stream = ExampleStream(_load(config, base), config, vocabulary)
    return Corpus(stream, stream.validation(), vocabulary.size)


@dataclass(frozen=True)
class ExampleStream:
    """The examples of a data set; `examples` is an IterableDataset."""

    examples: Any
    config: Data
    vocabulary: Vocabulary

    def windows(self, context: int, key: int, position: int) -> "StreamWindows":
        return StreamWindows(self, context, key, position)

    def documents(self, key: int, epoch: int, first: int) -> Iterator[Shard]:
        """Tokens of each example of an epoch from the `first` on; none for one that is held out."""
        order = self.examples.shuffle(seed=(key + epoch) % 2**32, buffer_size=SHUFFLE_BUFFER).skip(first)
        for text in self._texts(order):
            yield self._encode(text) if not self._held_out(text) else np.empty(0, dtype=np.uint8)

    def validation(self) -> TokenArray:
        shards: list[Shard] = []
        for text in self._texts(self.examples.take(VALIDATION_EXAMPLES)):
            if self._held_out(text):
                shards.append(self._encode(text))
            if sum(len(shard) for shard in shards) >= VALIDATION_TOKENS:
                break
        return TokenArray(shards)

    def _texts(self, examples: Iterable[dict[str, Any]]) -> Iterator[str]:
        for example in examples:
            text = example.get(self.config.column)
            if not isinstance(text, str):
                columns = ", ".join(sorted(example))
                raise DataError(f"{self.config.path} has no text in {self.config.column!r}; set data.column: {columns}")
            yield text

    def _held_out(self, text: str) -> bool:
        return held_out(text.encode(errors="replace"), self.config.validation_share)

    def _encode(self, text: str) -> Shard:
        return np.concatenate([self.vocabulary.encode(text), self.vocabulary.end])


class StreamWindows:
    """Windows cut one after the other from the row of documents; the last token of one is the first of the next."""

    def __init__(self, stream: ExampleStream, context: int, key: int, position: int) -> None:
        self._stream = stream
        self._context = context
        self._key = key
        place, self._token = divmod(position, _FIELD)
        self._epoch, self._example = divmod(place, _FIELD)
        self._open()

    @property
    def position(self) -> int:
        return (self._epoch * _FIELD + self._example) * _FIELD + self._token

    def take(self, count: int) -> Integers:
        row = self._read(count * self._context + 1)
        self._token -= 1  # the last one is only a target so far
        return np.stack([row[start : start + self._context + 1] for start in range(0, len(row) - 1, self._context)])

    def _read(self, length: int) -> Integers:
        out, filled = np.empty(length, dtype=np.int64), 0
        while filled < length:
            while self._token >= len(self._document):
                self._advance()
            piece = self._document[self._token : self._token + length - filled]
            out[filled : filled + len(piece)] = piece
            filled, self._token = filled + len(piece), self._token + len(piece)
        return out

    def _open(self) -> None:
        self._documents = self._stream.documents(self._key, self._epoch, self._example)
        self._empty_so_far = self._example == 0
        self._document = next(self._documents, np.empty(0, dtype=np.uint8))

    def _advance(self) -> None:
        self._empty_so_far = self._empty_so_far and not len(self._document)
        following = next(self._documents, None)
        self._token = 0
        if following is not None:
            self._document = following
            self._example = self._example + 1
            return
        if self._empty_so_far:
            raise DataError(f"{self._stream.config.path} holds no text to train on; name another split or column")
        self._epoch = self._epoch + 1
        self._example = 0
        self._open()


def _load(config: Data, base: Path) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            "data.source = 'hf' needs the package datasets; in murmur's source: pip install -e '.[hf]'"
        ) from error
    if not config.path:
        raise DataError("data.path is empty; set it to the folder or the name of a data set")
    folder = base / config.path
    try:
        return load_dataset(str(folder) if folder.exists() else config.path, split=config.split, streaming=True)
    except FileNotFoundError as error:
        raise MissingFileError(f"no data set {config.path!r}: {_line(error)}; mend data.path") from error
    except (OSError, ValueError) as error:
        raise DataError(f"cannot open the data set {config.path!r}: {_line(error)}; mend data.path or split") from error


def _line(error: Exception) -> str:
    return told(error).splitlines()[0]

"""A Hugging Face data set, streamed through `datasets` (the `hf` extra).

The stream shuffles examples by the peer's key (shards, and a buffer of SHUFFLE_BUFFER examples), encodes them and
reads them as one long sequence. A position is (epoch, example, token of that example) in one integer, so a restart
skips to the example and continues at the exact token. Skipping takes time in proportion to the examples skipped.

The hash of its text decides whether an example is held out. The first held-out examples, in the order of the data set,
are the validation text. This is the only source that reads from the network, unless the data set is a local folder.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from node.data.corpus import Corpus, Shard, TokenArray, TokenIds, is_held_out
from node.data.tokenizer import TextTokenizer
from protocol.errors import DataError, MissingFileError, describe_error
from protocol.manifest import DataSection

SHUFFLE_BUFFER = 1000
VALIDATION_TOKENS = 2**17
VALIDATION_EXAMPLES = 50_000  # searched for held-out text
_POSITION_RADIX = 2**32  # positions: example below 2**32 of an epoch, token below 2**32 of an example


def open_huggingface(config: DataSection, base: Path, tokenizer: TextTokenizer) -> Corpus:
    """Open the folder `config.path` below `base` if it exists, else the data set of that name on the hub."""
    stream = ExampleStream(_load_data_set(config, base), config, tokenizer)
    return Corpus(stream, stream.validation(), tokenizer.size)


@dataclass(frozen=True)
class ExampleStream:
    """The examples of a data set, an IterableDataset."""

    examples: Any
    config: DataSection
    tokenizer: TextTokenizer

    def windows(self, context: int, key: int, position: int) -> "StreamWindows":
        """Open the windows of `key` at `position`."""
        return StreamWindows(self, context, key, position)

    def documents(self, key: int, epoch: int, first: int) -> Iterator[Shard]:
        """Yield the tokens of each example of an epoch from `first` on, none for a held-out one."""
        order = self.examples.shuffle(seed=(key + epoch) % 2**32, buffer_size=SHUFFLE_BUFFER).skip(first)
        for text in self._texts(order):
            yield self._encode(text) if not self._is_held_out(text) else np.empty(0, dtype=np.uint8)

    def validation(self) -> TokenArray:
        """Collect the tokens of the first held-out examples."""
        shards: list[Shard] = []
        for text in self._texts(self.examples.take(VALIDATION_EXAMPLES)):
            if self._is_held_out(text):
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

    def _is_held_out(self, text: str) -> bool:
        return is_held_out(text.encode(errors="replace"), self.config.validation_share)

    def _encode(self, text: str) -> Shard:
        return np.concatenate([self.tokenizer.encode(text), self.tokenizer.end])


class StreamWindows:
    """Consecutive windows of the sequence of documents. The last token of one is the first of the next."""

    def __init__(self, stream: ExampleStream, context: int, key: int, position: int) -> None:
        self._stream = stream
        self._context = context
        self._key = key
        place, self._token = divmod(position, _POSITION_RADIX)
        self._epoch, self._example = divmod(place, _POSITION_RADIX)
        self._open_epoch()

    @property
    def position(self) -> int:
        """Return epoch, example and token of the next window as one integer."""
        return (self._epoch * _POSITION_RADIX + self._example) * _POSITION_RADIX + self._token

    def take(self, count: int) -> TokenIds:
        """Read the next windows, shape (count, context + 1)."""
        tokens = self._read_tokens(count * self._context + 1)
        self._token -= 1  # so far the last token was only a target
        starts = range(0, len(tokens) - 1, self._context)
        return np.stack([tokens[start : start + self._context + 1] for start in starts])

    def _read_tokens(self, length: int) -> TokenIds:
        out, filled = np.empty(length, dtype=np.int64), 0
        while filled < length:
            while self._token >= len(self._document):
                self._next_document()
            piece = self._document[self._token : self._token + length - filled]
            out[filled : filled + len(piece)] = piece
            filled, self._token = filled + len(piece), self._token + len(piece)
        return out

    def _open_epoch(self) -> None:
        self._documents = self._stream.documents(self._key, self._epoch, self._example)
        self._is_epoch_empty = self._example == 0
        self._document = next(self._documents, np.empty(0, dtype=np.uint8))

    def _next_document(self) -> None:
        self._is_epoch_empty = self._is_epoch_empty and not len(self._document)
        following = next(self._documents, None)
        self._token = 0
        if following is not None:
            self._document = following
            self._example = self._example + 1
            return
        if self._is_epoch_empty:
            raise DataError(f"{self._stream.config.path} holds no text to train on; name another split or column")
        self._epoch = self._epoch + 1
        self._example = 0
        self._open_epoch()


def _load_data_set(config: DataSection, base: Path) -> Any:
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
        raise MissingFileError(f"no data set {config.path!r}: {_first_line(error)}; fix data.path") from error
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot open the data set {config.path!r}: {_first_line(error)}; fix data.path or data.split"
        ) from error


def _first_line(error: Exception) -> str:
    return describe_error(error).splitlines()[0]

"""Tokenizers: the bytes of a text, or a Hugging Face tokenizer file (the `data` extra)."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from node.data.corpus import Shard
from protocol.errors import DataError, MissingFileError

BYTE_VALUES = 256
END_OF_TEXT_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class TextTokenizer(Protocol):
    """Encoder of a run. It has `size` token ids; `end` closes a document with one token or none."""

    size: int
    end: Shard

    def encode(self, text: str) -> Shard:
        """Return the token ids in the narrowest unsigned type that holds every id."""


class ByteTokenizer:
    """The bytes of the text in UTF-8 as ids 0 to 255. No token marks the end of a document."""

    def __init__(self) -> None:
        self.size = BYTE_VALUES
        self.end: Shard = np.empty(0, dtype=np.uint8)

    def encode(self, text: str) -> Shard:
        """Return the bytes of `text`."""
        return np.frombuffer(text.encode(), dtype=np.uint8)


class FileTokenizer:
    """A tokenizer.json. Its end-of-text token, if it has one of the usual names, closes each document."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = load_tokenizer_file(path)
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(ids.values(), default=-1) + 1
        self.end: Shard = self._array([ids[name] for name in END_OF_TEXT_TOKENS if name in ids][:1])

    def encode(self, text: str) -> Shard:
        """Return the token ids of `text`, without special tokens."""
        return self._array(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _array(self, ids: list[int]) -> Shard:
        return np.array(ids, dtype=token_dtype(self.size))


def load_tokenizer_file(path: Path) -> Any:
    """Load a Tokenizer of the library; raises MissingFileError or DataError."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DataError(
            "a tokenizer.json needs the package tokenizers; in murmur's source: pip install -e '.[data]'"
        ) from error
    if not path.is_file():
        raise MissingFileError(f"no tokenizer file {path}; put a tokenizer.json there, or name another")
    try:
        # The library raises a bare Exception for a file that it cannot read.
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise DataError(f"{path} is not a tokenizer.json ({error}); name one in Hugging Face's format") from error


def token_dtype(size: int) -> type[np.uint16] | type[np.uint32]:
    """Return the narrower type that holds all ids below `size`."""
    return np.uint16 if size <= 2**16 else np.uint32


def open_tokenizer(tokenizer_file: str, base: Path) -> TextTokenizer:
    """Open the manifest's tokenizer: a path relative to `base`, or an empty text for bytes."""
    return FileTokenizer(base / tokenizer_file) if tokenizer_file else ByteTokenizer()

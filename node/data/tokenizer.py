"""From text to token ids: bytes, or a Hugging Face tokenizer file (the `data` extra)."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from node.data.corpus import Shard
from protocol.errors import DataError, MissingFileError

BYTE_VALUES = 256
END_OF_TEXT_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class TextTokenizer(Protocol):
    """`size` is the number of token ids; `end` closes a document: one token id, or none."""

    size: int
    end: Shard

    def encode(self, text: str) -> Shard:
        """The token ids, in the narrowest unsigned type that holds every id."""


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of the text in UTF-8; nothing marks the end of a document."""

    def __init__(self) -> None:
        self.size = BYTE_VALUES
        self.end: Shard = np.empty(0, dtype=np.uint8)

    def encode(self, text: str) -> Shard:
        return np.frombuffer(text.encode(), dtype=np.uint8)


class FileTokenizer:
    """A tokenizer.json; its end-of-text token, if it has one of the usual names, closes each document."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = load_tokenizer_file(path)
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(ids.values(), default=-1) + 1
        self.end: Shard = self._array([ids[name] for name in END_OF_TEXT_TOKENS if name in ids][:1])

    def encode(self, text: str) -> Shard:
        return self._array(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _array(self, ids: list[int]) -> Shard:
        return np.array(ids, dtype=token_dtype(self.size))


def load_tokenizer_file(path: Path) -> Any:
    """The library's Tokenizer. Raises MissingFileError or DataError."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DataError(
            "a tokenizer.json needs the package tokenizers; in murmur's source: pip install -e '.[data]'"
        ) from error
    if not path.is_file():
        raise MissingFileError(f"no tokenizer file {path}; put a tokenizer.json there, or name another")
    try:
        # The library raises bare Exception on a file it cannot read; its text goes into ours.
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise DataError(f"{path} is no tokenizer.json ({error}); name one of Hugging Face's") from error


def token_dtype(size: int) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if size <= 2**16 else np.uint32


def open_tokenizer(tokenizer_file: str, base: Path) -> TextTokenizer:
    """`tokenizer` as in the manifest: a path relative to `base`, or empty for bytes."""
    return FileTokenizer(base / tokenizer_file) if tokenizer_file else ByteTokenizer()

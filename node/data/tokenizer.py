"""Tokenizers: the bytes of a text, or a Hugging Face tokenizer file (the `data` extra).

Training, `murmur tokenize`, `murmur generate` and the export read a tokenizer through this module alone, so all of
them see the same ids. A tokenizer file also holds settings of the model that it was made for: truncation, padding,
tokens around each text, dropout. They are removed here, because each of them would change the text of a run.
"""

import codecs
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from node.data.corpus import Shard, TokenIds
from node.run_dir import tokenizer_path
from protocol.errors import DataError, MissingFileError
from protocol.manifest.run import Manifest

BYTE_VALUES = 256
logger = logging.getLogger(__name__)

END_OF_TEXT_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
PAD_TOKENS = ("<|pad|>", "<|padding|>", "<pad>", "[PAD]")
REPLACEMENT = "\ufffd"
MAX_PENDING = 8  # tokens; a character of UTF-8 has at most four bytes


@dataclass(frozen=True)
class SpecialToken:
    """A token with a role, as Hugging Face's configurations name it."""

    text: str
    id: int
    is_added: bool  # whether the tokenizer finds it in a text before it splits the text


SpecialTokens = dict[str, SpecialToken]  # by role: eos, bos, pad


class ByteTokenizer:
    """The bytes of the text in UTF-8 as ids 0 to 255. No token marks the end of a document."""

    def __init__(self) -> None:
        self.size = BYTE_VALUES
        self.ids: TokenIds = np.arange(BYTE_VALUES)
        self.end: Shard = np.empty(0, dtype=np.uint8)
        self.special_tokens: SpecialTokens = {}

    def encode(self, text: str) -> Shard:
        """Return the bytes of `text`; a lone surrogate becomes a question mark."""
        return np.frombuffer(text.encode(errors="replace"), dtype=np.uint8)

    def encode_with_places(self, text: str) -> tuple[Shard, TokenIds]:
        """Return the bytes of `text`, and the place of the character of each."""
        first = np.repeat(np.arange(len(text)), [len(each.encode(errors="replace")) for each in text])
        return self.encode(text), np.stack([first, first + 1], axis=1)

    def decode(self, tokens: Iterator[int], after: Sequence[int] = ()) -> Iterator[str]:
        """Yield text once its bytes are complete; `after` was whole text, so it changes nothing."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        yield from (decoder.decode(bytes([token])) for token in tokens)
        yield decoder.decode(b"", final=True)

    def to_json(self) -> str:
        """Return a tokenizer.json with the same ids."""
        return json.dumps(byte_tokenizer_json(), indent=2) + "\n"


def byte_tokenizer_json() -> dict[str, Any]:
    """Return a tokenizer.json whose token n is the byte n: GPT-2's byte-level scheme without merges."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in enumerate(_bytes_to_unicode())},
            "merges": [],
        },
    }


def _bytes_to_unicode() -> list[str]:
    """Return the character for each byte: itself if it is printable Latin-1, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = map(chr, range(0x100, 0x200))
    return [chr(byte) if byte in printable else next(spare) for byte in range(256)]


class TextTokenizer(Protocol):
    """The tokenizer of a run. It has `size` token ids, of which `ids`, ascending, are tokens.

    `end` closes a document with one token or none.
    """

    size: int
    ids: TokenIds
    end: Shard

    @property
    def special_tokens(self) -> SpecialTokens:
        """Return the tokens with a role, by role."""

    def encode(self, text: str) -> Shard:
        """Return the token ids in the narrowest unsigned type that holds every id."""

    def encode_with_places(self, text: str) -> tuple[Shard, TokenIds]:
        """Return the token ids, words of special tokens included, and the characters (n, 2) that each is made of."""

    def decode(self, tokens: Iterator[int], after: Sequence[int] = ()) -> Iterator[str]:
        """Yield the text of `tokens`, which continue `after`, as soon as it is certain; a piece may be empty."""

    def to_json(self) -> str:
        """Return the content of a tokenizer.json that gives the same ids."""


class FileTokenizer:
    """A tokenizer.json. Its end-of-text token, if it has one of the usual names, closes each document."""

    def __init__(self, path: Path) -> None:
        data = _read_tokenizer_file(path)
        self._path = path
        self._text, self._tokenizer = _load_without_settings(data, path)
        self._tried: set[str] = set()
        self._added: dict[int, Any] = self._tokenizer.get_added_tokens_decoder()
        self._may_lose_text = _drops_unknown_characters(json.loads(self._text))
        self._vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not self._vocabulary:
            raise DataError(f"the tokenizer {path} has no tokens; name another")
        self.digest = hashlib.sha256(data).hexdigest()
        # A word that a file lists twice has two ids, of which the vocabulary names one.
        named = (i for i in range(self._tokenizer.get_vocab_size()) if self._tokenizer.id_to_token(i) is not None)
        self.ids: TokenIds = np.array(sorted({*self._vocabulary.values(), *named}), dtype=np.int64)
        self.size = int(self.ids[-1]) + 1
        self.end: Shard = self._array([token.id for token in self._find(END_OF_TEXT_TOKENS)])

    @cached_property
    def _template_tokenizer(self) -> Any:
        """Return the library's tokenizer that takes words of special tokens for these, as a chat template wants."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self._text)

    @property
    def special_tokens(self) -> SpecialTokens:
        """Return end, beginning and padding. A document begins after the end of another one."""
        end = self._find(END_OF_TEXT_TOKENS)
        pad = self._find(PAD_TOKENS) or end
        return {role: token for role, found in (("eos", end), ("bos", end), ("pad", pad)) for token in found}

    def encode(self, text: str) -> Shard:
        """Return the token ids of `text` alone; a lone surrogate becomes a question mark.

        Words of special tokens are text: a page that mentions `</s>` ends no document.
        """
        whole = text.encode(errors="replace").decode()
        if self._may_lose_text:
            self._warn_of_lost_text(whole)
        return self._array(self._encode(whole))

    def encode_with_places(self, text: str) -> tuple[Shard, TokenIds]:
        """Return the token ids, words of special tokens included, and the characters (n, 2) that each is made of."""
        whole = text.encode(errors="replace").decode()
        with _blame(self._path, "cannot encode the text"):
            found = self._template_tokenizer.encode(whole, add_special_tokens=False)
            return self._array(list(found.ids)), np.array(found.offsets, dtype=np.int64).reshape(-1, 2)

    def decode(self, tokens: Iterator[int], after: Sequence[int] = ()) -> Iterator[str]:
        """Yield text once its tokens are complete.

        The library's own stream raises an error where a byte of UTF-8 changes the text before it.
        """
        before, pending = list(after)[-MAX_PENDING:], list[int]()
        for token in tokens:
            pending.append(token)
            text = self._decode(before + pending)
            if text.endswith(REPLACEMENT) and len(pending) < MAX_PENDING:
                continue  # the next token may complete the character
            yield text[len(self._decode(before)) :]
            before, pending = pending, []
        yield self._decode(before + pending)[len(self._decode(before)) :]

    def to_json(self) -> str:
        """Return the content of the file without the settings that would change the text."""
        return self._text

    def _encode(self, text: str) -> list[int]:
        with _blame(self._path, "cannot encode the text"):
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _warn_of_lost_text(self, text: str) -> None:
        """Warn once of a character that gives no token; each is tried once."""
        new = set(text) - self._tried
        self._tried |= new
        nothing = (self._encode(""), self._encode(" "))
        lost = sorted(char for char in new if not char.isspace() and self._encode(char) in nothing)
        if lost:
            logger.warning(
                "the tokenizer %s has no token for %r, and no unknown token: it leaves such characters out; "
                "name one with an unknown token or with bytes",
                self._path,
                lost[0],
            )
            self._may_lose_text = False

    def _find(self, names: Sequence[str]) -> list[SpecialToken]:
        """Return the first of `names` in the vocabulary, or none."""
        found = [(name, self._vocabulary[name]) for name in names if name in self._vocabulary]
        return [SpecialToken(name, number, number in self._added) for name, number in found[:1]]

    def _decode(self, tokens: list[int]) -> str:
        with _blame(self._path, "cannot decode tokens"):
            return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def _array(self, ids: list[int]) -> Shard:
        return np.array(ids, dtype=token_dtype(self.size))


def token_dtype(size: int) -> type[np.uint16] | type[np.uint32]:
    """Return the narrower type that holds all ids below `size`."""
    return np.uint16 if size <= 2**16 else np.uint32


def open_tokenizer(tokenizer_file: str, base: Path) -> TextTokenizer:
    """Open the manifest's tokenizer: a path relative to `base`, or an empty text for bytes."""
    return FileTokenizer(base / tokenizer_file) if tokenizer_file else ByteTokenizer()


def open_node_tokenizer(run_dir: Path, manifest: Manifest) -> TextTokenizer:
    """Open the tokenizer of the run of a node's folder."""
    return FileTokenizer(tokenizer_path(run_dir, manifest)) if manifest.data.tokenizer else ByteTokenizer()


def tokenizer_digest(tokenizer_file: str, base: Path) -> str:
    """Return the digest of the manifest's tokenizer file, as the header of shards has it; empty for bytes."""
    return hashlib.sha256(_read_tokenizer_file(base / tokenizer_file)).hexdigest() if tokenizer_file else ""


def _read_tokenizer_file(path: Path) -> bytes:
    if path.is_dir():
        raise MissingFileError(f"{path} is a folder; name the tokenizer.json in it")
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise MissingFileError(f"no tokenizer file {path}; put a tokenizer.json there, or name another") from error
    except OSError as error:
        raise MissingFileError(f"cannot read the tokenizer {path}: {error.strerror}; fix it or name another") from error


def _load_without_settings(data: bytes, path: Path) -> tuple[str, Any]:
    """Return the text of a tokenizer.json without its settings, and the library's tokenizer of that text.

    The tokenizer takes the words of special tokens for text. So it takes those that end or pad documents here, although
    the file may not call them special.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DataError(
            "a tokenizer.json needs the package tokenizers; install it: pip install 'murmuration[data]'"
        ) from error
    with _blame(path, "is not a tokenizer.json", "name one in Hugging Face's format"):
        values = _without_settings(data)
        text = json.dumps(values, ensure_ascii=False)
        for token in values["added_tokens"]:
            token["special"] |= token["content"] in (*END_OF_TEXT_TOKENS, *PAD_TOKENS)
        tokenizer = Tokenizer.from_str(json.dumps(values, ensure_ascii=False))
        tokenizer.encode_special_tokens = True
        return text, tokenizer


def _without_settings(data: bytes) -> dict[str, Any]:
    values = json.loads(data.decode())
    if not isinstance(values, dict):
        raise ValueError("it holds no JSON object")
    values |= {"truncation": None, "padding": None, "post_processor": None}
    values.setdefault("added_tokens", [])  # transformers needs the list; the library does not
    if isinstance(values.get("model"), dict) and "dropout" in values["model"]:
        values["model"]["dropout"] = None
    return values


def _drops_unknown_characters(values: dict[str, Any]) -> bool:
    """Return whether the tokenizer leaves out characters without a token; the other kinds refuse such a text."""
    model = values["model"]
    is_complete = model.get("unk_token") is not None or model.get("byte_fallback")
    splits = json.dumps([values.get("normalizer"), values.get("pre_tokenizer")])
    return "merges" in model and not is_complete and '"ByteLevel"' not in splits


@contextmanager
def _blame(path: Path, fault: str, advice: str = "name another tokenizer") -> Iterator[None]:
    """Turn every failure of the library into a DataError that names the tokenizer file."""
    try:
        yield
    except Exception as error:  # the library raises a bare Exception for a file or a text that it cannot read
        raise _describe(path, fault, advice, error) from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise _describe(path, fault, advice, error) from error


def is_panic(error: BaseException) -> bool:
    """Return whether a library in Rust has panicked; its exception has no importable type and is not an Exception."""
    return type(error).__name__ == "PanicException" and type(error).__module__ == "pyo3_runtime"


def _describe(path: Path, fault: str, advice: str, error: BaseException) -> DataError:
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    subject = f"{path} {fault}" if fault.startswith("is") else f"the tokenizer {path} {fault}"
    return DataError(f"{subject} ({reason}); {advice}")

"""The tokenizer of a run without a tokenizer file: the bytes of UTF-8."""

import codecs
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from node.data.corpus import Shard, TokenIds

BYTE_VALUES = 256


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

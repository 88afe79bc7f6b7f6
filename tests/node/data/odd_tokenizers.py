"""Tokenizer files whose own settings, ids or tokens are odd, as people's files are."""

import copy
import json
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from node.data.tokenizer import byte_tokenizer_json

Json = dict[str, Any]


def added(token_id: int, text: str, special: bool = True, normalized: bool = False) -> Json:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized, "special": special}
    return {"id": token_id, "content": text, **flags}


def byte_level(**changes: Any) -> Json:
    """The bytes in order, and <s> and </s>."""
    return byte_tokenizer_json() | {"added_tokens": [added(256, "<s>"), added(257, "</s>")]} | changes


def template() -> Json:
    def piece(kind: str, name: str) -> Json:
        return {kind: {"id": name, "type_id": 0}}

    return {
        "type": "TemplateProcessing",
        "single": [piece("SpecialToken", "<s>"), piece("Sequence", "A"), piece("SpecialToken", "</s>")],
        "pair": [piece("Sequence", "A"), piece("Sequence", "B")],
        "special_tokens": {
            text: {"id": text, "ids": [number], "tokens": [text]} for number, text in ((256, "<s>"), (257, "</s>"))
        },
    }


def padding(length: int) -> Json:
    return {
        "strategy": {"Fixed": length},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 256,
        "pad_type_id": 0,
        "pad_token": "<s>",
    }


def with_holes() -> Json:
    values = byte_level()
    values["added_tokens"][1]["id"] = 700
    vocabulary = values["model"]["vocab"]
    values["model"]["vocab"] = {text: byte if byte < 250 else byte + 300 for text, byte in vocabulary.items()}
    return values


def dropout() -> Json:
    """Every merge of a byte-level BPE is left out at random."""
    values = byte_level()
    letters = list(values["model"]["vocab"])
    t, h, e = (letters[ord(letter)] for letter in "the")
    values["model"] |= {"dropout": 0.5, "merges": [[t, h], [t + h, e]]}
    values["model"]["vocab"] |= {t + h: 258, t + h + e: 259}
    return values


def own(tokenizer: Tokenizer) -> Json:
    values: Json = json.loads(tokenizer.to_str())
    return values


def byte_fallback() -> Json:
    """As Llama 2: pieces with spaces marked, bytes for all other characters, and a strip of the first space."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return own(tokenizer)


def end_in_vocabulary_alone() -> Json:
    """</s> is a word of the model, and no added token."""
    tokenizer = Tokenizer(models.WordLevel({"the": 0, "fox": 1, "</s>": 2, "[UNK]": 3, "<": 4, "/": 5}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return own(tokenizer)


def end_is_not_special() -> Json:
    """The end token is an ordinary added token, found in the text after lower-casing."""
    values = end_in_vocabulary_alone()
    values["normalizer"] = {"type": "Lowercase"}
    values["added_tokens"] = [added(2, "</s>", special=False, normalized=True)]
    return values


def unigram() -> Json:
    pieces = [
        ("<unk>", 0.0),
        ("<s>", 0.0),
        ("</s>", 0.0),
        *((letter, -3.0) for letter in "\u2581thefox"),
        ("the", -2.0),
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return own(tokenizer)


def word_twice() -> Json:
    """The unknown token has the text of a later piece."""
    values = unigram()
    values["model"]["vocab"][0] = values["model"]["vocab"][4]
    return values


ODD: dict[str, Json] = {
    "plain": byte_level(),
    "truncation": byte_level(
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    ),
    "padding": byte_level(padding=padding(500)),
    "template": byte_level(post_processor=template()),
    "holes": with_holes(),
    "dropout": dropout(),
    "byte fallback": byte_fallback(),
    "end in the vocabulary alone": end_in_vocabulary_alone(),
    "end is not special": end_is_not_special(),
    "unigram": unigram(),
    "word twice": word_twice(),
    "pad": byte_level(added_tokens=[added(256, "[PAD]"), added(257, "<eos>")]),
    "no end": byte_level(added_tokens=[]),
    "no list of added tokens": {key: value for key, value in byte_level().items() if key != "added_tokens"},
}


def odd_tokenizer(name: str) -> str:
    return json.dumps(copy.deepcopy(ODD[name]))

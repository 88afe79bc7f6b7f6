"""A tokenizer file gives the ids of the text alone, whatever its settings; its faults are one line."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from node.data.tokenizer import ByteTokenizer, FileTokenizer, is_panic, open_tokenizer
from protocol.errors import DataError, MissingFileError
from tests.node.data.odd_tokenizers import ODD, byte_level, odd_tokenizer

TEXT = "the fox </s> <s>x\n\n" * 20
CHANGED_BY_SETTINGS = ["truncation", "padding", "template", "dropout"]


def write(folder: Path, name: str) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(odd_tokenizer(name))
    return path


def library_ids(path: Path, text: str) -> list[int]:
    """What the file gives as it is."""
    return list(Tokenizer.from_file(str(path)).encode(text).ids)


@pytest.mark.parametrize("name", CHANGED_BY_SETTINGS)
def test_settings_of_the_file_do_not_reach_the_text(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name)
    encoded = [FileTokenizer(path).encode(TEXT).tolist() for _ in range(3)]
    assert encoded[0] == encoded[1] == encoded[2]
    assert library_ids(path, TEXT) != encoded[0], "the control: the file's own settings change the text"
    if name != "dropout":
        (tmp_path / "plain").mkdir()
        assert encoded[0] == FileTokenizer(write(tmp_path / "plain", "plain")).encode(TEXT).tolist()


@pytest.mark.parametrize("name", ODD)
def test_whole_text_is_encoded_and_no_id_is_a_hole(tmp_path: Path, name: str) -> None:
    tokenizer = FileTokenizer(write(tmp_path, name))
    ids = tokenizer.encode(TEXT)
    assert set(ids.tolist()) <= set(tokenizer.ids.tolist())
    assert ids.dtype == np.uint16 and len(ids) >= 4 * 20
    assert tokenizer.size == tokenizer.ids[-1] + 1 and (np.diff(tokenizer.ids) > 0).all()
    assert tokenizer.end.tolist() == [token.id for role, token in tokenizer.special_tokens.items() if role == "eos"]
    if name != "end is not special":  # the configuration beside the export calls it special
        export = Tokenizer.from_str(tokenizer.to_json())
        export.encode_special_tokens = True
        assert export.encode(TEXT).ids == ids.tolist(), "the export holds what was read"


def test_size_covers_ids_above_a_hole(tmp_path: Path) -> None:
    path = write(tmp_path, "holes")
    tokenizer = FileTokenizer(path)
    assert tokenizer.size == 556 and 300 not in tokenizer.ids and 555 in tokenizer.ids
    assert Tokenizer.from_file(str(path)).get_vocab_size() == 258, "the control: the number of tokens is less"


def test_roles_of_tokens(tmp_path: Path) -> None:
    tokens = FileTokenizer(write(tmp_path, "pad")).special_tokens
    assert {role: (token.text, token.id) for role, token in tokens.items()} == {
        "eos": ("<eos>", 257),
        "bos": ("<eos>", 257),
        "pad": ("[PAD]", 256),
    }
    assert FileTokenizer(write(tmp_path, "plain")).special_tokens["pad"].text == "</s>"
    assert FileTokenizer(write(tmp_path, "no end")).special_tokens == {}


def test_lone_surrogates_become_question_marks(tmp_path: Path) -> None:
    for tokenizer in (FileTokenizer(write(tmp_path, "plain")), ByteTokenizer()):
        assert bytes(tokenizer.encode("a\ud800b").tolist()) == b"a?b"


def pieces(tokenizer: FileTokenizer, ids: Iterator[int], after: tuple[int, ...] = ()) -> list[str]:
    return list(tokenizer.decode(ids, after))


@pytest.mark.parametrize("name", ["plain", "holes", "byte fallback", "unigram"])
def test_decoded_text_arrives_whole_and_in_order(tmp_path: Path, name: str) -> None:
    tokenizer = FileTokenizer(write(tmp_path, name))
    text = "the fox" if name == "unigram" else "a b \u00e9\u4e16\U0001f426 ab"
    found = pieces(tokenizer, iter(tokenizer.encode(text).tolist()))
    assert "".join(found) == text and len([piece for piece in found if piece]) > 3
    assert not any("\ufffd" in piece for piece in found), "no character is cut"


def test_space_between_prompt_and_continuation_is_kept(tmp_path: Path) -> None:
    tokenizer = FileTokenizer(write(tmp_path, "unigram"))
    ids = tokenizer.encode("the fox").tolist()
    assert "".join(pieces(tokenizer, iter(ids[2:]), tuple(ids[:2]))) == " fox"
    assert "".join(pieces(tokenizer, iter(ids[2:]))) == "fox", "the control: without the prompt it is lost"


@pytest.mark.parametrize("name", ODD)
def test_any_sequence_of_tokens_can_be_decoded(tmp_path: Path, name: str) -> None:
    """A model that has learnt nothing samples tokens in any order, invalid UTF-8 among them."""
    path, seed = write(tmp_path, name), 5
    tokenizer, random = FileTokenizer(path), np.random.default_rng(seed)
    print("seed", seed)
    for _ in range(20):
        ids = random.choice(tokenizer.ids, 60).tolist()
        assert "".join(pieces(tokenizer, iter(ids)))


def test_the_library_stream_fails_on_bytes_in_any_order(tmp_path: Path) -> None:
    """The control of the test above: why the class decodes by itself."""
    path, random = write(tmp_path, "byte fallback"), np.random.default_rng(5)
    library, ids = Tokenizer.from_file(str(path)), FileTokenizer(path).ids
    stream = DecodeStream(skip_special_tokens=False)
    with pytest.raises(Exception, match="Invalid prefix"):
        for token in random.choice(ids, 5000).tolist():
            stream.step(library, token)


def test_the_tokenizer_of_a_manifest(tmp_path: Path) -> None:
    write(tmp_path, "plain")
    assert isinstance(open_tokenizer("", tmp_path), ByteTokenizer)
    assert open_tokenizer("tokenizer.json", tmp_path).size == 258


NO_UNKNOWN = byte_level(added_tokens=[], pre_tokenizer={"type": "Whitespace"}, decoder=None) | {
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
}
NO_TOKENS = byte_level(added_tokens=[], model={"type": "BPE", "vocab": {}, "merges": []})
PANICS = byte_level()
PANICS["model"] = {
    "type": "BPE",
    "continuing_subword_prefix": "##longer",
    "vocab": {"a": 0, "b": 1, "ab": 2},
    "merges": ["a b"],
}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "is not a tokenizer.json"),
        ("[1, 2]", "is not a tokenizer.json .it holds no JSON object.; name one"),
        ('{"model_max_length": 512}', "is not a tokenizer.json"),
        ("[" * 100_000, "is not a tokenizer.json"),
        (b"\x0a\x0d\n\x05<unk>\xff", "is not a tokenizer.json"),
        (json.dumps(NO_TOKENS), "has no tokens; name another"),
        (json.dumps(PANICS), "is not a tokenizer.json"),
    ],
    ids=["empty", "a list", "another file", "nested", "bytes", "no tokens", "panic"],
)
def test_a_file_that_is_no_tokenizer_is_named_in_one_line(tmp_path: Path, content: str | bytes, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=text) as caught:
        FileTokenizer(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_panic_of_the_library_is_no_exception() -> None:
    """The control of the case above: `except Exception` does not catch it."""
    with pytest.raises(BaseException) as caught:
        Tokenizer.from_str(json.dumps(PANICS))
    assert is_panic(caught.value) and not isinstance(caught.value, Exception)
    assert not is_panic(KeyboardInterrupt())


def test_a_tokenizer_without_an_unknown_token_is_blamed(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(NO_UNKNOWN))
    assert FileTokenizer(path).encode("a a").tolist() == [0, 0]
    with pytest.raises(DataError, match=r"t\.json cannot encode the text \(.*\[UNK\].*\); name another tokenizer"):
        FileTokenizer(path).encode("a b")


LETTERS = byte_level(
    added_tokens=[],
    pre_tokenizer={"type": "WhitespaceSplit"},
    decoder=None,
    model={"type": "BPE", "unk_token": None, "vocab": {"a": 0, "c": 1, "?": 2, "ac": 3}, "merges": [["a", "c"]]},
)


def test_text_that_a_tokenizer_would_drop_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """BPE without an unknown token leaves out what it does not know, and says nothing."""
    path = tmp_path / "t.json"
    path.write_text(json.dumps(LETTERS))
    tokenizer = FileTokenizer(path)
    assert tokenizer.encode("ac a\nc ?").tolist() == [3, 0, 1, 2] and not caplog.records
    assert tokenizer.encode("ac\u4e16a").tolist() == tokenizer.encode("acxa").tolist() == [3, 0]
    (record,) = caplog.records
    assert "t.json has no token for '\u4e16', and no unknown token: it leaves such characters out" in record.message


def test_special_word_in_a_text_is_text(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(byte_level()))
    tokenizer, text = FileTokenizer(path), "a marker </s> closes a sentence"
    ids = tokenizer.encode(text)
    assert 257 not in ids and "".join(tokenizer.decode(iter(ids.tolist()))) == text
    from_template, _ = tokenizer.encode_with_places(text)
    assert 257 in from_template, "the control: a template's words are tokens"


@pytest.mark.parametrize("name", ODD)
def test_complete_tokenizers_lose_nothing(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    FileTokenizer(write(tmp_path, name)).encode("\u00e9\u4e16\U0001f426 x")
    assert not caplog.records


def test_a_place_without_a_tokenizer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingFileError, match="is a folder; name the tokenizer.json in it"):
        FileTokenizer(tmp_path)
    with pytest.raises(MissingFileError, match="no tokenizer file"):
        FileTokenizer(tmp_path / "none")

    def refuse(*_: object) -> bytes:
        raise PermissionError(13, os.strerror(13))

    path = write(tmp_path, "plain")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(MissingFileError, match="cannot read the tokenizer .*: Permission denied"):
        FileTokenizer(path)

"""Every source gives tokens, holds the right part out, and says in one line what is wrong with bad input."""

import json
import sysconfig
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from node.data import token_shards as tokens_module
from node.data import tokenize_files
from node.data.corpus import SourceText, TokenArray
from node.data.text_files import EXCLUDED_DIRS, list_stdlib_files
from protocol.errors import DataError, MissingFileError, MurmurError, StorageError, UsageError
from protocol.manifest.sections import DataSection
from tests.node.data.data_sets import open_only


def config(**values: object) -> DataSection:
    return DataSection.model_validate(values)


def tokens(row: object) -> list[int]:
    assert isinstance(row, TokenArray)
    return [int(token) for token in row.read(0, len(row))]


def text_of(corpus: SourceText) -> tuple[bytes, bytes]:
    return bytes(tokens(corpus.training)), bytes(tokens(corpus.validation))


def write_tokenizer(path: Path, words: int = 50) -> Path:
    vocabulary = {"</s>": 0, "<unk>": 1} | {f"w{index}": index + 2 for index in range(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(path))
    return path


def test_standard_library_is_large_real_and_fixed() -> None:
    corpus = open_only(config(source="python-stdlib"), Path("/nowhere"))
    assert isinstance(corpus.training, TokenArray)
    assert 5_000_000 < len(corpus.training) < 20_000_000
    assert 0.003 < len(corpus.validation) / len(corpus.training) < 0.06
    assert corpus.vocabulary_size == 256
    again = open_only(config(source="python-stdlib"), Path("/nowhere"))
    assert tokens(again.validation) == tokens(corpus.validation)


def test_standard_library_files_are_sorted_and_ours_are_not_among_them() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root).as_posix() for path in list_stdlib_files(root)]
    assert names == sorted(names) and "abc.py" in names
    assert not any(EXCLUDED_DIRS.intersection(Path(name).parts) for name in names)


def test_text_files_are_held_out_whole(tmp_path: Path) -> None:
    for index in range(60):
        (tmp_path / f"{index:02}.txt").write_text(f"<{index:02}>" * 5)
    training, validation = text_of(open_only(config(source="text", path="*.txt", validation_share=0.2), tmp_path))
    held = [index for index in range(60) if f"<{index:02}>".encode() in validation]
    assert 0 < len(held) < 30
    assert validation == b"".join(f"<{index:02}>".encode() * 5 for index in held)
    assert training == b"".join(f"<{index:02}>".encode() * 5 for index in range(60) if index not in held)
    (tmp_path / "61.txt").write_text("new")
    _, after = text_of(open_only(config(source="text", path="*.txt", validation_share=0.2), tmp_path))
    assert after in (validation, validation + b"new"), "a file more moves no other"


def test_one_text_file_gives_its_end(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_bytes(bytes(range(100)))
    training, validation = text_of(open_only(config(source="text", path="book.txt", validation_share=0.1), tmp_path))
    assert (training, validation) == (bytes(range(90)), bytes(range(90, 100)))


def test_absolute_glob(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("abcdefghij")
    corpus = open_only(config(source="text", path=f"{tmp_path}/*.txt"), Path("/nowhere"))
    assert text_of(corpus) == (b"abcdefghi", b"j")


def test_text_with_a_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    for index in range(2):
        (tmp_path / f"{index}.txt").write_text(f"w{index} w9 other")
    corpus = open_only(config(source="text", path="*.txt", tokenizer="tokenizer.json"), tmp_path)
    assert sorted([tokens(corpus.training), tokens(corpus.validation)]) == [[2, 11, 1, 0], [3, 11, 1, 0]]
    assert corpus.vocabulary_size == 52


def make_shards(folder: Path, monkeypatch: pytest.MonkeyPatch, words: int = 50) -> Path:
    monkeypatch.setattr(tokens_module, "SHARD_TOKENS", 7)
    write_tokenizer(folder / "tokenizer.json", words)
    for index in range(3):
        (folder / f"{index}.txt").write_text("\n".join(f"w{index} w{word}" for word in range(5)))
    tokenize_files(folder / "tokenizer.json", sorted(folder.glob("*.txt")), folder / "out")
    return folder / "out"


@pytest.mark.parametrize(("words", "width"), [(50, 2), (70_000, 4)])
def test_tokenized_shards_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: int, width: int) -> None:
    folder = make_shards(tmp_path, monkeypatch, words)
    expected = [token for file in range(3) for word in range(5) for token in (file + 2, word + 2)]
    expected = expected[:10] + [0] + expected[10:20] + [0] + expected[20:] + [0]
    corpus = open_only(config(source="tokens", path="out", tokenizer="tokenizer.json", validation_share=0.1), tmp_path)
    assert tokens(corpus.training) + tokens(corpus.validation) == expected
    assert len(corpus.validation) == 3 and corpus.vocabulary_size == words + 2
    assert sorted(file.stat().st_size for file in folder.glob("*.bin")) == [5 * width] + [7 * width] * 4
    assert sorted(file.name for file in folder.iterdir()) == [*(f"0000{n}.bin" for n in range(5)), "header.json"]


def test_tokenizing_blocks_gives_what_whole_files_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path / "t.json")
    (tmp_path / "long.txt").write_text("".join(f"w{index % 50} é\n" for index in range(1000)))
    for block in (10, 2**20):
        monkeypatch.setattr(tokens_module, "BLOCK_BYTES", block)
        tokenize_files(tmp_path / "t.json", [tmp_path / "long.txt"], tmp_path / f"out{block}")
    first, second = ((tmp_path / f"out{block}" / "00000.bin").read_bytes() for block in (10, 2**20))
    assert first == second and len(first) == 2 * 2001


def test_tokenizing_leaves_nothing_half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path / "t.json")
    (tmp_path / "bad.txt").write_bytes(b"w1 w2\n" * 10 + b"\xff")
    with pytest.raises(DataError, match=r"bad.txt is not UTF-8 \(byte 60\)"):
        tokenize_files(tmp_path / "t.json", [tmp_path / "bad.txt"], tmp_path / "out")
    (tmp_path / "bad.txt").write_text("w1")

    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", no_space)
    with pytest.raises(StorageError, match="No space left"):
        tokenize_files(tmp_path / "t.json", [tmp_path / "bad.txt"], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.txt", "t.json"]
    with pytest.raises(UsageError, match="not an empty folder"):
        tokenize_files(tmp_path / "t.json", [], tmp_path)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda folder: (folder / "header.json").unlink(), "run `murmur tokenize` to make it"),
        (lambda folder: (folder / "header.json").write_text("{"), "run `murmur tokenize` again"),
        (lambda folder: (folder / "00001.bin").unlink(), "00001.bin"),
        (lambda folder: (folder / "00001.bin").write_bytes(b"123"), "has 3 bytes, its header says 14"),
        (lambda folder: rename_shard(folder, "../../etc/passwd"), r"shards\.0\.name"),
    ],
)
def test_damaged_shards_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: object, text: str) -> None:
    folder = make_shards(tmp_path, monkeypatch)
    assert callable(damage)
    damage(folder)
    with pytest.raises(MurmurError, match=text):
        open_only(config(source="tokens", path="out", tokenizer="tokenizer.json"), tmp_path)


def rename_shard(folder: Path, name: str) -> None:
    header = json.loads((folder / "header.json").read_text())
    header["shards"][0]["name"] = name
    (folder / "header.json").write_text(json.dumps(header))


@pytest.mark.parametrize(
    ("values", "kind", "text"),
    [
        ({"source": "text", "path": "none*.txt"}, MissingFileError, "no file matches"),
        ({"source": "text"}, DataError, "data.path is empty"),
        ({"source": "text", "path": "latin.txt"}, DataError, r"latin.txt: not UTF-8 \(byte 3\)"),
        ({"source": "text", "path": "empty.txt"}, DataError, "empty.txt and the other files are empty"),
        ({"source": "text", "path": "*.txt", "tokenizer": "none.json"}, MissingFileError, "no tokenizer file"),
        ({"source": "text", "path": "*.txt", "tokenizer": "latin.txt"}, DataError, "is not a tokenizer.json"),
        ({"source": "tokens"}, DataError, "data.path is empty"),
        ({"source": "hf"}, DataError, "data.path is empty"),
        ({"source": "hf", "path": "void"}, MurmurError, "fix data.path"),
    ],
)
def test_bad_input_gets_one_line(tmp_path: Path, values: dict[str, str], kind: type[MurmurError], text: str) -> None:
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "void").mkdir()
    with pytest.raises(kind, match=text) as caught:
        open_only(config(**values), tmp_path)
    assert "\n" not in str(caught.value)

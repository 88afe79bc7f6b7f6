"""`murmur tokenize`: whole text in, usable shards out, and each wrong input named."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from node.data import token_shards as module
from node.data import tokenize_files
from node.data.token_shards import ShardsHeader
from node.monitoring.status_line import ByteProgress
from protocol.errors import DataError, MissingFileError, MurmurError, UsageError
from protocol.manifest.sections import DataSection
from tests.node.data.data_sets import open_only
from tests.node.data.odd_tokenizers import ODD, odd_tokenizer
from tests.node.data.test_tokenizer import NO_UNKNOWN

WORDS = "the fox \n" * 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "t.json").write_text(odd_tokenizer("plain"))
    (tmp_path / "a.txt").write_text(WORDS)
    (tmp_path / "empty.txt").write_text("")
    return tmp_path


def source(folder: Path, tokenizer: str = "t.json") -> list[int]:
    corpus = open_only(DataSection(source="tokens", path="out", tokenizer=tokenizer), folder)
    return [int(token) for part in (corpus.training, corpus.validation) for token in part.read(0, len(part))]  # type: ignore[attr-defined, arg-type]


@pytest.mark.parametrize("name", ODD)
def test_every_byte_is_in_the_shards(folder: Path, name: str) -> None:
    (folder / "t.json").write_text(odd_tokenizer(name))
    count = tokenize_files(folder / "t.json", [folder / "a.txt"], folder / "out")
    tokens = source(folder)
    assert count == len(tokens) and 200 <= count <= len(WORDS) + 2
    byte_level = ODD[name]["model"]["type"] == "BPE" and name not in ("holes", "dropout", "byte fallback")
    assert not byte_level or bytes(tokens[: len(WORDS)]) == WORDS.encode()


def test_an_empty_file_adds_no_end(folder: Path) -> None:
    files = [folder / name for name in ("empty.txt", "a.txt", "empty.txt", "a.txt")]
    tokenize_files(folder / "t.json", files, folder / "out")
    tokens = source(folder)
    assert tokens.count(257) == 2 and tokens[0] != 257


def test_an_empty_folder_is_filled(folder: Path) -> None:
    (folder / "out").mkdir()
    tokenize_files(folder / "t.json", [folder / "a.txt"], folder / "out")
    assert len(source(folder)) == len(WORDS) + 1


@pytest.mark.parametrize(
    ("tokenizer", "files", "kind", "text"),
    [
        ("t.json", ["."], UsageError, r"is a folder; name the files in it, such as .*/\*\.txt"),
        ("t.json", ["empty.txt"], DataError, "empty.txt holds no text; name files with text"),
        ("t.json", ["empty.txt", "empty.txt"], DataError, "empty.txt and the other files hold no text"),
        ("t.json", ["none.txt"], MissingFileError, "cannot read .*none.txt: No such file"),
        ("t.json", ["a.txt", "bad.txt"], DataError, r"bad.txt is not UTF-8 \(byte 5\)"),
        ("t.json", ["loop.txt"], MissingFileError, "cannot read .*loop.txt: Too many levels"),
        ("none.json", ["a.txt"], MissingFileError, "no tokenizer file .*none.json"),
        ("a.txt", ["a.txt"], DataError, "a.txt is not a tokenizer.json"),
        (".", ["a.txt"], MissingFileError, "is a folder; name the tokenizer.json in it"),
        ("nounk.json", ["a.txt"], DataError, r"nounk\.json cannot encode the text"),
    ],
)
def test_a_wrong_input_is_named_and_nothing_is_left(
    folder: Path, tokenizer: str, files: list[str], kind: type[MurmurError], text: str
) -> None:
    (folder / "bad.txt").write_bytes(b"abcd\n\xff")
    (folder / "loop.txt").symlink_to("loop.txt")
    (folder / "nounk.json").write_text(json.dumps(NO_UNKNOWN))
    with pytest.raises(kind, match=text) as caught:
        tokenize_files(folder / tokenizer, [folder / name for name in files], folder / "out")
    assert str(caught.value).isprintable() and not (folder / "out").exists()


def test_an_unreadable_file_is_blamed_rather_than_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, mode: str) -> io.BytesIO:
        raise PermissionError(13, os.strerror(13))

    data = (folder / "t.json").read_bytes()
    monkeypatch.setattr(Path, "read_bytes", lambda self: data)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(MissingFileError, match=r"cannot read .*a\.txt: Permission denied; fix it or leave it out"):
        tokenize_files(folder / "t.json", [folder / "a.txt"], folder / "out")


def test_a_taken_place_is_named(folder: Path) -> None:
    with pytest.raises(UsageError, match="a.txt exists and is not an empty folder; name a new one"):
        tokenize_files(folder / "t.json", [folder / "a.txt"], folder / "a.txt")
    assert (folder / "a.txt").read_text() == WORDS


def test_shards_of_another_tokenizer_are_refused(folder: Path) -> None:
    tokenize_files(folder / "t.json", [folder / "a.txt"], folder / "out")
    assert len(source(folder)) == len(WORDS) + 1, "the control: their own is taken"
    (folder / "other.json").write_text(odd_tokenizer("pad"))
    with pytest.raises(DataError, match=r"with another tokenizer \(SHA-256 .{12}\.\.\.\) than data\.tokenizer names"):
        source(folder, "other.json")
    with pytest.raises(DataError, match="but data.tokenizer is empty; name its own"):
        source(folder, "")
    with pytest.raises(MissingFileError, match="no tokenizer file"):
        source(folder, "none.json")


def test_shards_of_bytes_have_no_tokenizer(folder: Path) -> None:
    tokenize_files(folder / "t.json", [folder / "a.txt"], folder / "out")
    path = folder / "out" / "header.json"
    header = ShardsHeader.model_validate_json(path.read_bytes())
    path.write_text(header.model_copy(update={"tokenizer": ""}).model_dump_json())
    with pytest.raises(DataError, match="was made without a tokenizer file, but data.tokenizer names one"):
        source(folder)
    assert len(source(folder, "")) == len(WORDS) + 1


def shown(is_terminal: bool) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=is_terminal, width=100)
    with ByteProgress("tokenizing", 3_000_000, console) as progress:
        assert sum(len(chunk) for chunk in progress.count([bytes(1_000_000)] * 2)) == 2_000_000
    return text.getvalue()


def test_progress_is_a_line_on_a_terminal_and_nothing_elsewhere() -> None:
    assert "tokenizing" in shown(True) and "2.0/3.0 MB" in shown(True)
    assert shown(False) == ""


@pytest.mark.slow
def test_interrupt_says_what_is_safe_and_leaves_nothing(folder: Path) -> None:
    """A pipe that never ends is read until Ctrl-C, which the parallel workers of these tests ignore."""
    os.mkfifo(folder / "pipe")
    pipe = os.open(folder / "pipe", os.O_RDWR)
    program = "import signal; signal.signal(2, signal.default_int_handler); from node.cli import main; main()"
    command = [sys.executable, "-P", "-c", program, "tokenize", "t.json", "out", "pipe"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not (folder / "out" / ".incomplete").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(2)
        out, error = process.communicate(timeout=60)
    os.close(pipe)
    assert (process.returncode, out) == (130, "")
    assert error == "murmur: stopped; out and your files are as they were before\n"
    assert not (folder / "out").exists()


def test_blocks_are_whole_lines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "long.txt").write_text("\u00e9 fox\n" * 500)
    for block in (3, 2**20):
        monkeypatch.setattr(module, "BLOCK_BYTES", block)
        tokenize_files(folder / "t.json", [folder / "long.txt"], folder / f"out{block}")
    first, second = ((folder / f"out{block}" / "00000.bin").read_bytes() for block in (3, 2**20))
    assert first == second

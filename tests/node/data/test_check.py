"""The check before the network names faults of the text in one line, and describes a usable text."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.data import check
from node.data.check import TextReport, check_text
from node.data.skipped_rows import SkipLog
from node.data.tokenizer import ByteTokenizer
from protocol.errors import DataError, MissingFileError
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest
from protocol.manifest.sections import DataSection
from tests.node.data.data_sets import open_only, write_rows

TEST_RUN = load_manifest(Path(__file__).parents[3] / "configs" / "test.toml")


def run_with(**values: object) -> Manifest:
    return TEST_RUN.model_copy(update={"data": DataSection.model_validate(values)})


def read(manifest: Manifest, folder: Path) -> TextReport:
    return check.read_text(manifest, manifest.data.mixture[0], folder)


def write_texts(folder: Path, count: int) -> None:
    for index in range(count):
        (folder / f"{index:03}.txt").write_text(f"text \x1b[31m number {index}\n" * 20)


def test_text_files_are_counted_and_a_sample_is_shown_without_control_characters(tmp_path: Path) -> None:
    write_texts(tmp_path, 100)
    (report,) = check_text(run_with(source="text", path="*.txt", validation_share=0.2), tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.txt"))
    assert (report.documents, report.tokens, report.is_complete, report.skipped) == (100, size, True, ())
    sample = " ".join(["text \ufffd[31m number 0"] * 3)[:57]
    assert report.describe() == f'100 documents, 41.8k tokens; sample: "{sample}..."'


def test_questions_of_a_task_need_no_file(tmp_path: Path) -> None:
    (report,) = check_text(run_with(source="questions", path="reverse"), tmp_path)
    assert report.tokens > 10_000 and report.vocabulary == 256 and "reverse" in report.sample


def test_task_that_nobody_knows_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no questions"):
        check_text(run_with(source="questions", path="rhyme"), tmp_path)


@pytest.mark.parametrize("clock", [iter(range(0, 10_000, 1))])
def test_long_text_is_read_for_a_few_seconds_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Iterator[int]
) -> None:
    write_texts(tmp_path, 100)
    manifest = run_with(source="text", path="*.txt")
    (source,) = manifest.data.mixture
    report = check._read_documents(manifest, source, tmp_path, lambda: float(next(clock)))
    assert report.documents is not None and 1 <= report.documents < 5 and not report.is_complete
    assert report.describe().startswith("at least ")
    monkeypatch.setattr(check, "READ_SECONDS", 1e9)
    whole = check._read_documents(manifest, source, tmp_path, lambda: float(next(clock)))
    assert whole.is_complete, "the negative control"


def test_one_long_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "PIECE_CHARACTERS", 100)
    (tmp_path / "book.txt").write_text("0123456789" * 1000)
    manifest, clock = run_with(source="text", path="book.txt"), iter(range(10_000))
    report = check._read_documents(manifest, manifest.data.mixture[0], tmp_path, lambda: float(next(clock)))
    assert report.documents == 1 and 100 <= report.tokens < 1000 and not report.is_complete
    whole = read(manifest, tmp_path)
    assert (whole.documents, whole.tokens, whole.is_complete) == (1, 10_000, True)


@pytest.mark.parametrize(
    ("values", "kind", "text"),
    [
        ({"source": "text", "path": "**.txt"}, DataError, "is not a glob of files"),
        ({"source": "text", "path": "/"}, MissingFileError, "is a folder, write for example"),
        ({"source": "text", "path": "."}, MissingFileError, "is a folder, write for example"),
        ({"source": "text", "path": "empty"}, MissingFileError, "empty is a folder, write for example"),
        ({"source": "text", "path": "empty/*"}, MissingFileError, "no file matches"),
        ({"source": "text", "path": "["}, MissingFileError, "no file matches"),
        ({"source": "text", "path": "nothing.txt"}, DataError, "is empty; give files with text"),
        ({"source": "text", "path": "short.txt"}, DataError, "the held-out text has 1 tokens, a window 33"),
        ({"source": "text", "path": "latin.txt"}, DataError, "latin.txt: not UTF-8"),
        ({"source": "tokens", "path": "empty"}, MissingFileError, "run `murmur tokenize` to make it"),
        ({"source": "hf", "path": "short.txt"}, DataError, "is a file; name the folder"),
    ],
)
def test_text_that_cannot_be_used_is_named_in_one_line(
    tmp_path: Path, values: dict[str, str], kind: type[Exception], text: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing.txt").touch()
    (tmp_path / "short.txt").write_text("a short text of less than two windows")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(kind, match=text) as caught:
        read(run_with(**values), tmp_path)
    assert "\n" not in str(caught.value)


def test_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts(tmp_path, 1)

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match="000.txt: cannot read it: Permission denied"):
        read(run_with(source="text", path="*.txt"), tmp_path)


def test_file_names_that_are_not_utf8_are_read(tmp_path: Path) -> None:
    write_texts(tmp_path, 20)
    (Path(str(tmp_path)) / "caf\udce9.txt").write_bytes(b"caf\xe9")
    report = read(run_with(source="text", path="*.txt", validation_share=0.2), tmp_path)
    assert report.documents == 20 and "caf\ufffd.txt: not UTF-8" in report.skipped[0]


def test_held_out_part_is_judged_as_the_trainer_divides_it(tmp_path: Path) -> None:
    """Whatever is held out by name, the counts are those of the corpus that is built."""
    for count in (1, 2, 3, 10):
        write_texts(tmp_path, count)
        config = DataSection(source="text", path="*.txt", validation_share=0.1)
        opened, (source,) = open_only(config, tmp_path), config.mixture
        counted = check._TokenCount(0.1)
        for piece in check._pieces(config, source, tmp_path, ByteTokenizer(), SkipLog()):
            counted.add(piece)
        assert counted.held_out_tokens(are_files=True) == len(opened.validation)


@pytest.mark.slow
def test_data_set_is_checked_in_a_child_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    write_rows(tmp_path / "set/a.jsonl", [*({"text": f"row {index} of a set"} for index in range(200)), {"text": None}])
    (report,) = check_text(run_with(source="hf", path="set", validation_share=0.2), tmp_path)
    assert report.documents == 200 and report.is_complete and "a.jsonl row 201: no text" in report.skipped[0]
    assert report.describe().startswith("200 documents, 3.1k tokens, skipped 1 row; sample: ")
    with pytest.raises(DataError, match="set data.column: text"):
        check_text(run_with(source="hf", path="set", column="body"), tmp_path)
    monkeypatch.setattr(check, "CHILD_SECONDS", 0.01)
    (late,) = check_text(run_with(source="hf", path="set"), tmp_path)
    assert late.describe().startswith("not checked: the data set did not answer")


def test_child_that_dies_is_named_with_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho first >&2\necho Killed >&2\nexit 137\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    with pytest.raises(DataError, match="cannot be read: Killed"):
        check_text(run_with(source="hf", path="set"), tmp_path)


def test_report_describes_shards_without_documents() -> None:
    report = TextReport(tokens=5_600_000, sample="once upon a time")
    assert report.describe() == '5.6M tokens; sample: "once upon a time"'


def test_shards_with_damaged_ids_are_named(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    data = bytearray(b"a\x00" * 20_000)
    header = {
        "dtype": "uint16",
        "vocabulary": 256,
        "tokenizer": "",
        "shards": [{"name": "00000.bin", "tokens": 20_000}],
    }
    (shards / "header.json").write_text(json.dumps(header))
    (shards / "00000.bin").write_bytes(data)
    report = read(run_with(source="tokens", path="shards"), tmp_path)
    assert report.describe() == f'20.0k tokens; sample: "{"a" * 33}"'
    for part in (slice(-400, None), slice(0, 20_000)):  # of the held-out text, of the training text
        damaged = bytearray(data)
        damaged[part] = b"\xff" * len(damaged[part])
        (shards / "00000.bin").write_bytes(damaged)
        with pytest.raises(DataError, match=r"token id 65535 in the text, above 255; tokenize it again"):
            read(run_with(source="tokens", path="shards"), tmp_path)

"""Rows that cannot be used are skipped, counted and named; too many of them end the run with the reason."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.data import BatchReader, open_corpus, validation_batches
from node.data import huggingface as row_files_module
from node.data.batches import CIRCLE
from node.data.huggingface import ExampleStream, Row, read_rows
from node.data.skipped_rows import Fault
from protocol.errors import DataError
from tests.node.data.data_sets import hf_config, write_rows

GOOD = [{"text": f"row {index} of some words to train on, and more", "n": index} for index in range(300)]
FAULTS = {
    "null": {"text": None},
    "missing column": {"n": 1},
    "not text": {"text": ["a", "list"]},
    "malformed row": b'{"text": "cut off',
    "bad UTF-8": b'{"text": "caf\xe9"}',
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


def read_epoch(folder: Path) -> tuple[dict[str, int], tuple[str, ...]]:
    """Read more than an epoch; return the skipped rows by reason and the log lines."""
    corpus = open_corpus(hf_config(), folder)
    validation_batches(corpus, 16, 100)
    reader = BatchReader(corpus, 16, 0, "p")
    for _ in range(250):
        reader.next_batch(4)
    report = corpus.skip_log.take_report()
    return ({str(reason): count for reason, count in report.counts.items()}, report.lines) if report else ({}, ())


@pytest.mark.parametrize("reason", FAULTS)
def test_unusable_row_is_skipped_counted_and_named_once(tmp_path: Path, reason: str) -> None:
    write_rows(tmp_path / "set/a.jsonl", [*GOOD[:250], FAULTS[reason], *GOOD[250:]])
    counts, lines = read_epoch(tmp_path)
    assert set(counts) == {reason} and counts[reason] >= 2, "once for the held-out text, once in the epoch"
    assert len(lines) == 1 and "a.jsonl row 251: " in lines[0]


def test_usable_rows_leave_no_report(tmp_path: Path) -> None:
    """The negative control."""
    write_rows(tmp_path / "set/a.jsonl", GOOD)
    assert read_epoch(tmp_path) == ({}, ())


def test_escaped_surrogate_and_deep_nesting_are_unusable_rows(tmp_path: Path) -> None:
    deep = b'{"text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    write_rows(tmp_path / "set/a.jsonl", [*GOOD, b'{"text": "\\ud800"}', deep])
    assert set(read_epoch(tmp_path)[0]) == {"bad UTF-8", "malformed row"}


def test_long_row_is_skipped_without_reading_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files_module, "MAX_ROW_BYTES", 1000)
    write_rows(tmp_path / "set/a.jsonl", [*GOOD[:100], {"text": "x" * 5000}, *GOOD[100:], {"text": "y" * 5000}])
    counts, lines = read_epoch(tmp_path)
    assert set(counts) == {"too long"} and "row 101: " in lines[0]


def test_files_may_have_other_columns(tmp_path: Path) -> None:
    write_rows(tmp_path / "set/a.jsonl", GOOD)
    write_rows(tmp_path / "set/b.jsonl", [{"text": "one more", "extra": {"x": 1}}])
    (tmp_path / "set/c.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": "packed", "n": {}}).encode()))
    assert read_epoch(tmp_path) == ({}, ())


def test_last_line_that_was_cut_costs_one_row(tmp_path: Path) -> None:
    write_rows(tmp_path / "set/a.jsonl", [*GOOD, json.dumps(GOOD[0]).encode()[:20]])
    assert set(read_epoch(tmp_path)[0]) == {"malformed row"}


def test_too_many_unusable_rows_end_the_run_with_the_first(tmp_path: Path) -> None:
    write_rows(tmp_path / "set/a.jsonl", [*GOOD, *([{"text": None}] * 15)])
    read_epoch(tmp_path)
    write_rows(tmp_path / "set/a.jsonl", [*GOOD, *([{"text": None}] * 17)])
    with pytest.raises(DataError, match=r"17 of 317 rows .* above 5%; the first: .*a.jsonl row 301: no text in 'text'"):
        read_epoch(tmp_path)


def test_few_rows_may_have_one_fault(tmp_path: Path) -> None:
    write_rows(tmp_path / "set/a.jsonl", [*GOOD[:9], {"text": None}])
    open_corpus(hf_config(), tmp_path)
    write_rows(tmp_path / "set/a.jsonl", [*GOOD[:9], {"text": None}, {"text": None}, {"text": None}])
    with pytest.raises(DataError, match="3 of 12 rows"):
        open_corpus(hf_config(), tmp_path)


def test_json_files_with_a_row_in_each_line_lose_only_the_bad_line(tmp_path: Path) -> None:
    write_rows(tmp_path / "set/a.json", [*GOOD, FAULTS["malformed row"]])
    assert set(read_epoch(tmp_path)[0]) == {"malformed row"}


def test_json_file_with_one_list_is_read_by_the_library(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/a.json").write_text(json.dumps(GOOD, indent=1))
    assert read_epoch(tmp_path) == ({}, ())


def test_text_files_of_a_set_lose_only_the_bad_line(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    lines = [f"line {index} of some words\n".encode() for index in range(500)]
    (tmp_path / "set/a.txt").write_bytes(b"".join([*lines, b"caf\xe9\n", *lines]))
    counts, named = read_epoch(tmp_path)
    assert set(counts) == {"bad UTF-8"} and "a.txt row 501: not UTF-8 (byte 3)" in named[0]


def write_parquet(file: Path, **columns: list[object]) -> None:
    import pyarrow
    import pyarrow.parquet

    file.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), file)


def test_parquet_files_may_have_other_columns_and_empty_texts(tmp_path: Path) -> None:
    texts: list[object] = [row["text"] for row in GOOD]
    write_parquet(tmp_path / "set/a.parquet", text=texts, n=list(range(300)))
    write_parquet(tmp_path / "set/b.parquet", text=["one more", None], n=["x", "y"], extra=[1, 2])
    counts, lines = read_epoch(tmp_path)
    assert set(counts) == {"null"} and "b.parquet row 2: " in lines[0]


def test_one_unreadable_file_of_many_is_skipped(tmp_path: Path) -> None:
    for index in range(20):
        write_parquet(tmp_path / f"set/{index:02}.parquet", text=[row["text"] for row in GOOD[index::20]])
    write_parquet(tmp_path / "set/07.parquet", other=["x", "y"])
    counts, lines = read_epoch(tmp_path)
    assert set(counts) == {"unreadable file"} and "07.parquet row 1: cannot read on" in lines[0]
    write_parquet(tmp_path / "set/08.parquet", other=["x", "y"])
    with pytest.raises(DataError, match="2 of 20 files are unreadable"):
        read_epoch(tmp_path)


def test_one_file_of_many_with_too_many_faults_is_given_up(tmp_path: Path) -> None:
    """The order of the files, which differs by peer, must not decide whether a run ends."""
    for index in range(20):
        write_rows(tmp_path / f"set/{index:02}.jsonl", GOOD)
    write_rows(tmp_path / "set/00.jsonl", [{"text": None}] * 1000)
    corpus = open_corpus(hf_config(), tmp_path)
    for peer in "abcdefghij":
        BatchReader(corpus, 16, 0, peer).next_batch(4)
    report = corpus.skip_log.take_report()
    assert report is not None and report.counts["null"] < 3000, "the rest of the file is not read"
    write_rows(tmp_path / "set/01.jsonl", [{"text": None}] * 1000)
    with pytest.raises(DataError, match=r"100 of 100 rows .*; 2 of 20 files are unreadable"):
        read_epoch(tmp_path)


def test_unusable_rows_at_the_end_of_an_epoch_do_not_end_a_restart(tmp_path: Path) -> None:
    """A pass from the middle of an epoch is too short to be judged at its end."""
    write_rows(tmp_path / "set/a.jsonl", [*GOOD, {"text": None}, {"text": None}])
    corpus = open_corpus(hf_config(), tmp_path)
    read = sum(len(json.dumps(row)) + 1 for row in GOOD)
    position = CIRCLE * read * 2**24  # the last good row is read
    assert isinstance(corpus.sources[0].training, ExampleStream)
    assert BatchReader(corpus, 16, 0, "p", position).next_batch(4).shape == (4, 17)


class BreakingFile:
    """A file of ten rows that breaks off after each `between` rows."""

    def __init__(self, name: str, between: int, error: Exception) -> None:
        self.name, self._between, self._error = name, between, error
        self.opened = 0

    def rows(self, start: int) -> Iterator[Row]:
        self.opened += 1
        for number in range(start, 10):
            if number >= start + self._between:
                raise self._error
            yield Row(number + 1, f"row {number + 1}", f"text {number}")


def test_file_on_the_network_is_read_on_where_it_broke_off() -> None:
    waits: list[float] = []
    file = BreakingFile("hf://set/a.parquet", 3, ConnectionError("reset"))
    assert [row.content for row in read_rows(file, 0, waits.append)] == [f"text {number}" for number in range(10)]
    assert file.opened == 4 and waits == [1.0, 1.0, 1.0], "each row read makes the next wait short again"


def test_file_that_stays_unreachable_is_named() -> None:
    waits: list[float] = []
    rows = read_rows(BreakingFile("hf://set/a.parquet", 0, TimeoutError("read timed out")), 0, waits.append)
    with pytest.raises(DataError, match="cannot read hf://set/a.parquet: read timed out; check the network"):
        list(rows)
    assert waits == list(row_files_module.RETRY_SECONDS)


@pytest.mark.parametrize("error", [RuntimeError("odd\nlines"), OSError(5, "Input/output error"), EOFError()])
def test_damaged_file_ends_with_a_fault(error: Exception) -> None:
    rows = list(read_rows(BreakingFile("a.parquet", 4, error), 0))
    assert [row.next for row in rows] == [1, 2, 3, 4, 4] and rows[-1].name == "after row 4"
    fault = rows[-1].content
    assert isinstance(fault, Fault) and fault.reason == "unreadable file" and "\n" not in fault.text

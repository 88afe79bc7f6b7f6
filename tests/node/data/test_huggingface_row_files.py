"""A file is read on from the place of any row, and what is before the place is not read where the format allows it."""

import gzip
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pytest
from pyarrow import parquet

from node.data import huggingface
from node.data.huggingface import LinesFile, ParquetRows, RowFile, parse_json_row, parse_text_row

ROWS = [f"text of row {number} " + chr(228) * (number % 7) for number in range(3000)]
GROUP = 200


def lines_file(folder: Path) -> RowFile:
    (folder / "a.jsonl").write_text("\n\n".join(json.dumps({"text": row}) for row in ROWS))
    return LinesFile(str(folder / "a.jsonl"), "text", parse_json_row)


def text_file(folder: Path) -> RowFile:
    (folder / "a.txt").write_text("\n".join(ROWS))
    return LinesFile(str(folder / "a.txt"), "text", parse_text_row)


def compressed_file(folder: Path) -> RowFile:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(json.dumps({"text": row}) for row in ROWS).encode(), 0))
    return LinesFile(str(folder / "a.jsonl.gz"), "text", parse_json_row)


def parquet_file(folder: Path) -> RowFile:
    table = pa.table({"other": list(range(len(ROWS))), "text": ROWS})
    parquet.write_table(table, folder / "a.parquet", row_group_size=GROUP, compression="none", use_dictionary=False)
    return ParquetRows(str(folder / "a.parquet"), "text")


class CountedReads:
    """Counts the bytes that are read of files."""

    def __init__(self) -> None:
        self.bytes = 0

    def wrap(self, file: BinaryIO) -> BinaryIO:
        read, readline = file.read, file.readline

        def count(data: Any) -> Any:
            self.bytes += len(data)
            return data

        file.read = lambda *size: count(read(*size))  # type: ignore[method-assign]
        file.readline = lambda *size: count(readline(*size))  # type: ignore[method-assign]
        return file


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> CountedReads:
    counted, opened = CountedReads(), huggingface.open_file

    class Opened:
        def __init__(self, inner: AbstractContextManager[BinaryIO]) -> None:
            self._inner = inner

        def __enter__(self) -> BinaryIO:
            return counted.wrap(self._inner.__enter__())

        def __exit__(self, *fault: Any) -> None:
            self._inner.__exit__(*fault)

    monkeypatch.setattr(huggingface, "open_file", lambda *words, **options: Opened(opened(*words, **options)))
    return counted


def first(rows: Iterator[Any]) -> Any:
    return next(rows, None)


@pytest.mark.parametrize("make", [lines_file, text_file, compressed_file, parquet_file])
def test_rows_go_on_at_the_place_of_any_row(tmp_path: Path, make: Any) -> None:
    file = make(tmp_path)
    rows = list(file.rows(0))
    assert [row.content.strip() for row in rows] == [row.strip() for row in ROWS]
    for number in (0, 1, GROUP - 1, GROUP, GROUP + 1, 1999, 2998):
        again = first(file.rows(rows[number].next))
        assert (again.content, again.next) == (rows[number + 1].content, rows[number + 1].next)
    assert first(file.rows(rows[-1].next)) is None


@pytest.mark.parametrize(("make", "is_constant"), [(lines_file, True), (text_file, True), (compressed_file, False)])
def test_only_a_compressed_file_is_read_from_its_beginning(
    tmp_path: Path, counted: CountedReads, make: Any, is_constant: bool
) -> None:
    file = make(tmp_path)
    place = [row.next for row in file.rows(0)][2500]
    counted.bytes = 0
    assert first(file.rows(place)).content.strip() == ROWS[2501].strip()
    assert (counted.bytes < 1000) == is_constant


def test_parquet_is_read_from_the_group_of_the_row_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, groups = parquet_file(tmp_path), list[int]()
    iter_batches = parquet.ParquetFile.iter_batches

    def note(self: Any, size: int, row_groups: list[int], columns: list[str]) -> Any:
        groups.extend(row_groups)
        return iter_batches(self, size, row_groups, columns)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", note)
    assert first(file.rows(2501)).content == ROWS[2501] and groups == [2501 // GROUP]

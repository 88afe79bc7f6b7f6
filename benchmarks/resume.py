"""Measure how long a peer takes to find its place in a data set again, at 10 % and at 90 % of one local file.

    python benchmarks/resume.py [--rows 200000] [--json]

The control skips rows with the library that the files are written for: `IterableDataset.skip` for Parquet and JSON
lines. Takes a minute. The exit code is 1 if a format that is resumed at once takes twice as long at 90 % as at 10 %,
and more than a tenth of a second.
"""

import argparse
import gzip
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from pyarrow import parquet

from node.data.huggingface import LibraryFile, LinesFile, ParquetRows, RowFile, parse_json_row

SHARES = (0.1, 0.9)
ROW_CHARACTERS = 1000
GROUP_ROWS = 1000
MAX_SECONDS = 0.1


@dataclass(frozen=True)
class Report:
    """Seconds until the first row, by share of the file; `is_constant` says whether they should not grow."""

    file: str
    reader: str
    seconds: tuple[float, ...]
    is_constant: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        reports = list(measure(Path(folder), words.rows))
    print(json.dumps([asdict(report) for report in reports]) if words.json else table(reports))
    grown = (report for report in reports if report.is_constant and report.seconds[1] > 2 * report.seconds[0])
    return int(any(report.seconds[1] > MAX_SECONDS for report in grown))


def measure(folder: Path, rows: int) -> Iterator[Report]:
    for write, ours in ((write_parquet, open_parquet), (write_lines, open_lines)):
        path = write(folder, rows)
        yield Report(path.suffix, "ours", time_rows(ours(path), rows), is_constant=True)
        kind = "parquet" if path.suffix == ".parquet" else "json"
        library = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
        yield Report(path.suffix, "IterableDataset.skip", time_library(library, rows), is_constant=False)
    packed = folder / "set.jsonl.gz"
    packed.write_bytes(gzip.compress((folder / "set.jsonl").read_bytes(), 1))
    yield Report(".jsonl.gz", "ours", time_rows(open_lines(packed), rows), is_constant=False)


def texts(rows: int) -> Iterator[str]:
    return (f"{number:08} ".ljust(ROW_CHARACTERS, "abcdefgh"[number % 8]) for number in range(rows))


def write_parquet(folder: Path, rows: int) -> Path:
    path, source = folder / "set.parquet", texts(rows)
    with parquet.ParquetWriter(path, pa.schema([("text", pa.string())])) as writer:
        while group := list(islice(source, GROUP_ROWS)):
            writer.write_table(pa.table({"text": group}))
    return path


def write_lines(folder: Path, rows: int) -> Path:
    path = folder / "set.jsonl"
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts(rows))
    return path


def open_parquet(path: Path) -> RowFile:
    return ParquetRows(str(path), "text")


def open_lines(path: Path) -> RowFile:
    return LinesFile(str(path), "text", parse_json_row)


def time_rows(file: RowFile, rows: int) -> tuple[float, ...]:
    places = {number: row.next for number, row in enumerate(file.rows(0), 1)}
    return tuple(seconds_of(lambda at=int(share * rows): next(iter(file.rows(places[at])))) for share in SHARES)  # type: ignore[misc]


def time_library(examples: Any, rows: int) -> tuple[float, ...]:
    file = LibraryFile("set", "text", examples)
    return tuple(seconds_of(lambda at=int(share * rows): next(iter(file.rows(at)))) for share in SHARES)  # type: ignore[misc]


def seconds_of(read: Callable[[], object]) -> float:
    """Return the seconds of the faster of two calls."""
    found = []
    for _ in range(2):
        began = time.perf_counter()
        read()
        found.append(time.perf_counter() - began)
    return min(found)


def table(reports: list[Report]) -> str:
    head = "| file | reader | seconds at 10 % | seconds at 90 % |\n|---|---|---|---|"
    rows = [
        f"| {report.file} | {report.reader} | " + " | ".join(f"{seconds:.3f}" for seconds in report.seconds) + " |"
        for report in reports
    ]
    return "\n".join([head, *rows])


if __name__ == "__main__":
    sys.exit(main())

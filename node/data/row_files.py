"""Read the rows of one file of a data set: lines and Parquet by ourselves, every other format through `datasets`.

A file of JSON lines or of text is read line by line, so a damaged line costs that line only. The library reads blocks
of rows; if one fails, the rest of its file is skipped. A file on the network is read again from the row where it broke
off.

A place in a file is a number from which its rows can be read on. It is a byte in a file of lines and the number of a
row in Parquet, both of which are reached at once. A compressed file and the library read all rows before the place.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, Protocol

from node.data.skipped_rows import Fault
from protocol.errors import DataError, describe_error

MAX_ROW_BYTES = 2**26
RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0, 60.0, 60.0)  # together below the trainer's watchdog
JSON_LINES_NAME = re.compile(r"\.(jsonl|ndjson)(\.(gz|bz2|xz))?$", re.IGNORECASE)
JSON_NAME = re.compile(r"\.json(\.(gz|bz2|xz))?$", re.IGNORECASE)
TEXT_NAME = re.compile(r"\.txt(\.(gz|bz2|xz))?$", re.IGNORECASE)
MAX_FIRST_LINE_BYTES = 2**20
PARQUET_BATCH_ROWS = 1024
_TOO_LONG = Fault("too long", f"the row is longer than {MAX_ROW_BYTES >> 20} MiB")


class Row(NamedTuple):
    """A row of a file: the place of the next one, its own name, and its text or the reason why there is none."""

    next: int
    name: str
    content: str | Fault


class RowFile(Protocol):
    """One file of a data set."""

    @property
    def name(self) -> str:
        """Return the path or address."""

    def rows(self, start: int) -> Iterator[Row]:
        """Yield the rows from the place `start` on; 0 is the first."""


@dataclass(frozen=True)
class LinesFile:
    """A file with one row in each line, local or on the hub, perhaps compressed."""

    name: str
    column: str
    parse: Callable[[bytes, str], str | Fault]

    def rows(self, start: int) -> Iterator[Row]:
        """Yield the rows from the place `start` on."""
        with open_file(self.name, compression="infer") as file:
            for place, name, line in self._lines(file, start):
                if line is None or line.strip():
                    yield Row(place, name, _TOO_LONG if line is None else self.parse(line, self.column))

    def _lines(self, file: BinaryIO, start: int) -> Iterator[tuple[int, str, bytes | None]]:
        """Yield the place behind each line from `start` on, its name and its bytes, or None if it is too long."""
        if _is_compressed(self.name):
            for number, (_, line) in enumerate(_read_lines(file), 1):
                if number > start:
                    yield number, f"row {number}", line
            return
        file.seek(start)
        for number, (size, line) in enumerate(_read_lines(file), 1):
            yield start + size, f"row {number} after byte {start}" if start else f"row {number}", line


def open_file(name: str, compression: str | None = None) -> AbstractContextManager[BinaryIO]:
    """Open a local file, or one on the hub."""
    import fsspec  # comes with `datasets`

    opened: AbstractContextManager[BinaryIO] = fsspec.open(name, "rb", compression=compression)
    return opened


def _is_compressed(name: str) -> bool:
    from fsspec.utils import infer_compression

    return infer_compression(name) is not None


def has_json_lines(name: str) -> bool:
    """Return whether a file has a JSON object in each line. The name decides, and for `.json` the first line."""
    if JSON_LINES_NAME.search(name):
        return True
    if not JSON_NAME.search(name):
        return False
    with open_file(name, compression="infer") as file:
        try:
            return isinstance(json.loads(file.readline(MAX_FIRST_LINE_BYTES)), dict)
        except (ValueError, RecursionError):
            return False  # one JSON value over several lines; the library reads it


def _read_lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield the bytes read so far and the newest line of a file, which is None if it is too long."""
    size = 0
    while line := file.readline(MAX_ROW_BYTES):
        size += len(line)
        if len(line) < MAX_ROW_BYTES:
            yield size, line
            continue
        while not line.endswith(b"\n") and line:
            line = file.readline(MAX_ROW_BYTES)
            size += len(line)
        yield size, None


def parse_json_row(line: bytes, column: str) -> str | Fault:
    """Return the text of a line of JSON, or why it has none."""
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Fault("bad UTF-8", f"not UTF-8 (byte {error.start})")
    except (ValueError, RecursionError) as error:
        return Fault("malformed row", f"not JSON ({describe_error(error)})")
    if not isinstance(values, dict):
        return Fault("malformed row", "not a JSON object")
    return find_text(values, column)


def parse_text_row(line: bytes, column: str) -> str | Fault:
    """Return a line of a text file, which has no columns, or why it is none."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        return Fault("bad UTF-8", f"not UTF-8 (byte {error.start})")


def find_text(values: dict[str, Any], column: str) -> str | Fault:
    """Return the text in `column` of a row, or why there is none."""
    text = values.get(column)
    if column not in values:
        return Fault("missing column", f"no column {column!r}; set data.column: {', '.join(sorted(map(str, values)))}")
    if text is None:
        return Fault("null", f"no text in {column!r}, it is null")
    if not isinstance(text, str):
        return Fault("not text", f"no text in {column!r}, it is of type {type(text).__name__}; set data.column")
    if len(text) > MAX_ROW_BYTES:
        return _TOO_LONG
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Fault("bad UTF-8", f"not Unicode text (character {error.start})")
    return text


@dataclass(frozen=True)
class LibraryFile:
    """One shard of an IterableDataset."""

    name: str
    column: str
    examples: Any

    def rows(self, start: int) -> Iterator[Row]:
        """Yield the rows from number `start` on."""
        for number, values in enumerate(self.examples.skip(start), start + 1):
            yield Row(number, f"row {number}", find_text(values, self.column))


@dataclass(frozen=True)
class ParquetRows:
    """A Parquet file, local or on the hub. Only the groups of rows from the wanted one on are read."""

    name: str
    column: str

    def rows(self, start: int) -> Iterator[Row]:
        """Yield the rows from number `start` on."""
        from pyarrow import parquet  # comes with `datasets`

        with open_file(self.name) as opened, parquet.ParquetFile(opened) as file:
            if self.column not in file.schema_arrow.names:
                raise ValueError(f"no column {self.column!r}")
            number, end = 0, 0
            for group in range(file.num_row_groups):
                number, end = end, end + file.metadata.row_group(group).num_rows
                if end <= start:
                    continue
                for batch in file.iter_batches(PARQUET_BATCH_ROWS, [group], [self.column]):
                    first = max(0, start - number)
                    number += len(batch)
                    for index, text in enumerate(batch.column(0)[first:].to_pylist(), number - len(batch) + first + 1):
                        yield Row(index, f"row {index}", find_text({self.column: text}, self.column))


def read_rows(file: RowFile, start: int, sleep: Callable[[float], None] = time.sleep) -> Iterator[Row]:
    """Yield the rows of a file from `start` on; a Fault "unreadable file" ends a damaged one.

    Raises:
        DataError: A file on the network stays unreachable.
    """
    delays, place = iter(RETRY_SECONDS), f"place {start}" if start else "row 1"
    while True:
        try:
            for row in file.rows(start):
                yield row
                start, place, delays = row.next, f"after {row.name}", iter(RETRY_SECONDS)
            return
        except MemoryError:
            raise
        except OSError as error:
            if "://" not in file.name:
                yield _unreadable(start, place, error)
                return
            delay = next(delays, None)
            if delay is None:
                line = f"cannot read {file.name}: {first_line(error)}; check the network, or whether the data set moved"
                raise DataError(line) from error
            sleep(delay)
        except Exception as error:  # the library and its formats raise errors of many kinds
            yield _unreadable(start, place, error)
            return


def _unreadable(start: int, place: str, error: Exception) -> Row:
    return Row(start, place, Fault("unreadable file", f"cannot read on: {first_line(error)}"))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return describe_error(error).splitlines()[0]

"""Read the rows of one file of a data set: lines by ourselves, every other format through `datasets`.

A file of JSON lines or of text is read line by line, so a damaged line costs that line only. The library reads blocks
of rows; if one fails, the rest of its file is skipped. A file on the network is read again from the row where it broke
off.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from node.data.skipped_rows import Fault
from protocol.errors import DataError, describe_error

MAX_ROW_BYTES = 2**26
RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0, 60.0, 60.0)  # together below the trainer's watchdog
JSON_LINES_NAME = re.compile(r"\.(jsonl|ndjson)(\.(gz|bz2|xz))?$", re.IGNORECASE)
JSON_NAME = re.compile(r"\.json(\.(gz|bz2|xz))?$", re.IGNORECASE)
TEXT_NAME = re.compile(r"\.txt(\.(gz|bz2|xz))?$", re.IGNORECASE)
MAX_FIRST_LINE_BYTES = 2**20
_TOO_LONG = Fault("too long", f"the row is longer than {MAX_ROW_BYTES >> 20} MiB")
Row = tuple[int, str | Fault]  # number in the file, and the text or the reason why there is none


class RowFile(Protocol):
    """One file of a data set."""

    @property
    def name(self) -> str:
        """Return the path or address."""

    def rows(self, first: int) -> Iterator[Row]:
        """Yield the rows from number `first` on."""


@dataclass(frozen=True)
class LinesFile:
    """A file with one row in each line, local or on the hub, perhaps compressed."""

    name: str
    column: str
    parse: Callable[[bytes, str], str | Fault]

    def rows(self, first: int) -> Iterator[Row]:
        """Yield the rows from number `first` on."""
        with _open_file(self.name) as file:
            for number, line in enumerate(_read_lines(file)):
                if number >= first and (line is None or line.strip()):
                    yield number, _TOO_LONG if line is None else self.parse(line, self.column)


def _open_file(name: str) -> AbstractContextManager[BinaryIO]:
    import fsspec  # comes with `datasets`

    opened: AbstractContextManager[BinaryIO] = fsspec.open(name, "rb", compression="infer")
    return opened


def has_json_lines(name: str) -> bool:
    """Return whether a file has a JSON object in each line. The name decides, and for `.json` the first line."""
    if JSON_LINES_NAME.search(name):
        return True
    if not JSON_NAME.search(name):
        return False
    with _open_file(name) as file:
        try:
            return isinstance(json.loads(file.readline(MAX_FIRST_LINE_BYTES)), dict)
        except (ValueError, RecursionError):
            return False  # one JSON value over several lines; the library reads it


def _read_lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield the lines of a file, and None for a line that is too long."""
    while line := file.readline(MAX_ROW_BYTES):
        if len(line) < MAX_ROW_BYTES:
            yield line
            continue
        while not line.endswith(b"\n") and line:
            line = file.readline(MAX_ROW_BYTES)
        yield None


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

    def rows(self, first: int) -> Iterator[Row]:
        """Yield the rows from number `first` on."""
        for number, values in enumerate(self.examples.skip(first), start=first):
            yield number, find_text(values, self.column)


def read_rows(file: RowFile, first: int, sleep: Callable[[float], None] = time.sleep) -> Iterator[Row]:
    """Yield the rows of a file from `first` on; a Fault "unreadable file" ends a damaged one.

    Raises:
        DataError: A file on the network stays unreachable.
    """
    delays = iter(RETRY_SECONDS)
    while True:
        try:
            for number, row in file.rows(first):
                yield number, row
                first, delays = number + 1, iter(RETRY_SECONDS)
            return
        except MemoryError:
            raise
        except OSError as error:
            if "://" not in file.name:
                yield first, _unreadable(error)
                return
            delay = next(delays, None)
            if delay is None:
                line = f"cannot read {file.name}: {first_line(error)}; check the network, or whether the data set moved"
                raise DataError(line) from error
            sleep(delay)
        except Exception as error:  # the library and its formats raise errors of many kinds
            yield first, _unreadable(error)
            return


def _unreadable(error: Exception) -> Fault:
    return Fault("unreadable file", f"cannot read on: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return describe_error(error).splitlines()[0]

"""The events of a run on disk: one JSON line each, only ever appended to.

A host that was killed may leave a torn last line; it is cut off at the next start. Everything before it is whole.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from node.host.events import MAX_EVENT_BYTES, LoggedEvent, read_event
from protocol.errors import MissingFileError, StorageError

EVENT_FILE_NAME = "events.jsonl"


class EventFile:
    """Open for appending; raises StorageError where the disk refuses."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path

    @classmethod
    def open(cls, path: Path) -> "EventFile":
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with path.open("ab") as file:
                file.truncate(whole_lines_size(path))
            return cls(path.open("ab", buffering=0), path)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}; choose another --dir") from error

    def append(self, event: LoggedEvent) -> None:
        line = event.model_dump_json().encode() + b"\n"
        try:
            written = self._file.write(line)
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error.strerror}; free some space") from error
        if written != len(line):  # the next start cuts the torn line off
            raise StorageError(f"cannot write {self._path}: no space left; free some space")

    def close(self) -> None:
        self._file.close()


def read_events(path: Path) -> Iterator[LoggedEvent]:
    """All whole lines. MissingFileError where there is no file, DataError for a line that is no event."""
    try:
        with path.open("rb") as file:
            number = 0
            while (line := file.readline(MAX_EVENT_BYTES + 1)).endswith(b"\n"):
                number += 1
                yield read_event(line, f"{path}, line {number}")
            if len(line) > MAX_EVENT_BYTES:
                read_event(line, f"{path}, line {number + 1}")
    except OSError as error:
        raise MissingFileError(f"cannot read {path}: {error.strerror}; name a journal of `murmur host`") from error


def whole_lines_size(path: Path) -> int:
    """Up to the end of the last whole line."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - MAX_EVENT_BYTES)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0

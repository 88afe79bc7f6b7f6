"""The file of metrics: lines of JSON, at most two files of MAX_FILE_BYTES, and a reader that follows it."""

import os
from pathlib import Path
from typing import BinaryIO, Final

from node.bounded_file import append_bounded

METRICS_FILE: Final = "metrics.jsonl"
MAX_FILE_BYTES: Final = 8 << 20  # some thirty thousand lines
MAX_LINE_BYTES: Final = 1 << 14


def append_line(folder: Path, line: str, max_bytes: int = MAX_FILE_BYTES) -> None:
    """Add a line to the file. Raises OSError."""
    append_bounded(folder / METRICS_FILE, line + "\n", max_bytes)


class Follower:
    """Reads the lines that are added to the file from `offset` on, also after it was replaced."""

    def __init__(self, folder: Path, offset: int) -> None:
        self._path = folder / METRICS_FILE
        self._offset = offset
        self._file: BinaryIO | None = None
        self._rest = b""

    def read_lines(self) -> list[bytes]:
        """Return the whole lines that are new."""
        lines = self._read()
        if self._file is not None and self._is_replaced(self._file):
            lines += self._read()  # what came before it was replaced
            self.close()
            lines += self._read()
        return lines

    def close(self) -> None:
        """Close the file; the next read begins at the start of the new one."""
        if self._file is not None:
            self._file.close()
        self._file, self._offset, self._rest = None, 0, b""

    def _read(self) -> list[bytes]:
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except OSError:
                return []  # there is no line yet
            self._file.seek(self._offset if self._offset <= os.fstat(self._file.fileno()).st_size else 0)
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest = b""
        return [line for line in lines if line]

    def _is_replaced(self, file: BinaryIO) -> bool:
        try:
            return os.fstat(file.fileno()).st_ino != os.stat(self._path).st_ino
        except OSError:
            return False  # the new one has no line yet

"""The file of metrics: lines of JSON, at most two files of MAX_FILE_BYTES, and a reader that follows it."""

import math
import os
from pathlib import Path
from typing import BinaryIO, Final

from pydantic import BaseModel, ConfigDict

from node.monitoring.status import NodeStatus
from node.run_dir import append_bounded

INTERVAL_SECONDS: Final = 30.0  # between two lines of one round
METRICS_FILE: Final = "metrics.jsonl"
MAX_FILE_BYTES: Final = 8 << 20  # some thirty thousand lines
MAX_LINE_BYTES: Final = 1 << 14


class MetricsLine(BaseModel):
    """The metrics at one moment; `None` means not measured. Losses are in nats a token, bytes count from the start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time: float
    round: int
    step: int
    tokens: int
    run_tokens: int
    peers: int
    bytes_sent: int
    bytes_received: int
    loss: float | None = None
    validation_loss: float | None = None
    validation_round: int | None = None
    tokens_per_second: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None

    @classmethod
    def of(cls, status: NodeStatus, now: float) -> "MetricsLine":
        """Return the line of a status; numbers that are not finite are left out."""
        values = {name: getattr(status, name, None) for name in cls.model_fields}
        named = {"time": round(now, 3), "run_tokens": status.chain_tokens}
        finite = {name: None if _is_odd(value) else value for name, value in values.items()}
        return cls.model_validate(finite | named)


def _is_odd(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def is_line_due(newest: MetricsLine | None, now: MetricsLine) -> bool:
    """Return whether to write a line: once a round, and now and then within a long one."""
    if newest is None:
        return now.round > 0 or now.step > 0
    if now.round != newest.round:
        return True
    return now.step != newest.step and now.time - newest.time >= INTERVAL_SECONDS


def is_new(newest: MetricsLine | None, now: MetricsLine) -> bool:
    """Return whether the last line of a node says more than the one before."""
    if newest is None:
        return now.round > 0 or now.step > 0
    return now.model_copy(update={"time": newest.time}) != newest


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

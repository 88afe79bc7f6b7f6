"""Standard error of a running node: log lines, and one status line if it is a terminal.

Without a terminal the status is a log line from time to time, and so is an activity that takes long.
"""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, Self, TextIO

from rich.cells import cell_len

from node.monitoring.logs import JsonFormatter, PlainFormatter
from node.monitoring.peer_lines import LineLimit, PeerNames
from node.monitoring.status import NodeStatus, StatusSource
from node.monitoring.status_line import REDRAW_SECONDS, StatusLine, is_capable_terminal, ticking
from node.units import format_bytes, format_clock, format_count, format_plural

logger = logging.getLogger(__name__)
SEPARATOR = " · "
WAITING_PHASES = ("starting", "joining", "waiting for peers", "catching up", "leaving")
MIN_PHASE_SECONDS = 3.0  # shorter waits need no clock
OUR_PACKAGES = ("node", "protocol", "optim")
SILENCED_LOGGERS = ("grpc._common",)  # logs a traceback for each malformed message; our own line is enough
LOG_STATUS_SECONDS = 60.0  # without a terminal
SLOW_SECONDS = 5.0  # an activity that takes longer is logged where there is no terminal


class Part(NamedTuple):
    """One figure of a status line; those of a high rank are dropped first where there is little room."""

    rank: int
    text: str


def status_parts(status: NodeStatus, phase_seconds: float) -> list[Part]:
    """Return the figures of the status line in their order.

    Args:
        status: the status of the node.
        phase_seconds: how long the node has been in its phase.
    """
    trouble = [Part(-1, status.key_conflict)] if status.key_conflict else []
    if status.phase in WAITING_PHASES:
        return [*trouble, *_waiting_parts(status, phase_seconds)]
    left = [Part(2, text) for text in status.describe_left()]
    if status.phase == "watching":
        return [*trouble, *_watching_parts(status), *left]
    if status.phase == "rolling out":
        return [*trouble, *_rollout_parts(status), *left]
    return [*trouble, *_training_parts(status), *left]


def fit_parts(parts: Sequence[Part], width: int) -> str:
    """Join as many parts as fit, dropping those of the highest rank first."""
    kept = list(parts)
    while len(kept) > 1 and cell_len(SEPARATOR.join(part.text for part in kept)) > width:
        kept.remove(max(reversed(kept), key=lambda part: part.rank))
    return SEPARATOR.join(part.text for part in kept)


def _waiting_parts(status: NodeStatus, seconds: float) -> list[Part]:
    doing = f"{status.phase}: {status.reason}" if status.reason else status.phase
    clock = [Part(1, format_clock(seconds))] if seconds >= MIN_PHASE_SECONDS else []
    received = [Part(2, f"received {format_bytes(status.bytes_received)}")] if status.phase == "catching up" else []
    return [Part(0, doing), *received, *clock]


def _watching_parts(status: NodeStatus) -> list[Part]:
    loss = [] if status.loss is None else [Part(1, f"loss {status.loss:.3f}")]
    peers = Part(1, format_plural(status.peers, "peer"))
    return [
        Part(0, status.describe_round()), *loss, peers, Part(4, f"sent {format_bytes(status.bytes_sent)}"),
        Part(3, f"page {status.page}"),
    ]  # fmt: skip


def _rollout_parts(status: NodeStatus) -> list[Part]:
    return [
        Part(0, status.describe_round()),
        Part(1, status.describe_groups()),
        Part(3, f"{format_count(status.tokens_per_second)} tok/s"),
        Part(6, f"sent {format_bytes(status.bytes_sent)}"),
        Part(8, format_plural(status.peers, "peer")),
        *_trouble_parts(status),
    ]


def _training_parts(status: NodeStatus) -> list[Part]:
    decided = status.contributions_included + status.contributions_excluded
    figures = [Part(0, status.describe_round()), Part(7, f"step {status.step}")]
    if status.loss is not None:
        figures.append(Part(1, f"loss {status.loss:.3f}"))
    if validation := status.describe_validation():
        figures.append(Part(4, validation))
    figures += [
        Part(3, f"{format_count(status.tokens_per_second)} tok/s"),
        Part(5, f"included {status.contributions_included}/{decided}"),
        Part(6, f"sent {format_bytes(status.bytes_sent)}"),
        Part(8, format_plural(status.peers, "peer")),
    ]
    return [*figures, *_trouble_parts(status)]


def _trouble_parts(status: NodeStatus) -> list[Part]:
    """Return why the node does not contribute, and what was not saved."""
    contributing = status.describe_contributing()
    if contributing == "yes" or status.is_done:
        reason = ""
    elif status.last_included_round is None and not status.absence and not status.trainer_trouble:
        reason = ""  # it has only begun
    else:
        reason = contributing.removeprefix("no: ").removeprefix("no, ").partition(";")[0]
    pace = [Part(6, status.pace.partition(":")[0])] if status.pace else []
    unsaved = [Part(0, f"not saved: {status.unsaved}")] if status.unsaved else []
    return [*pace, *([Part(0, f"not contributing: {reason}")] if reason else []), *unsaved]


class Display:
    """The lines of one command on `stream`; `has_line` is False if programs read them."""

    def __init__(self, stream: TextIO, has_line: bool = True) -> None:
        self.names = PeerNames()
        self._stream = stream
        self._line = StatusLine(stream) if has_line and is_capable_terminal(stream) else None

    def __enter__(self) -> Self:
        if self._line:
            self._line.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the status line; later log lines are plain ones."""
        line, self._line = self._line, None
        if line:
            line.close()

    def write_line(self, text: str) -> None:
        """Write a line, above the status line if there is one."""
        if self._line:
            self._line.write_above(f"{text}\n")
        else:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    @contextmanager
    def activity(self, text: str) -> Iterator[None]:
        """Show what the command does in the body, and for how long already."""
        if self._line:
            with ticking(self._line, text):
                yield
            return
        notice = threading.Timer(SLOW_SECONDS, logger.info, ("%s", text))
        notice.daemon = True
        notice.start()
        try:
            yield
        finally:
            notice.cancel()

    async def show_status(self, source: StatusSource) -> None:
        """Show the status of a node until cancelled."""
        phase, logs_status = "", self._line is None
        logged_at = phase_began = time.monotonic()
        while True:
            status, now = source.status(), time.monotonic()
            if status.phase != phase:
                phase, phase_began = status.phase, now
            parts = status_parts(status, now - phase_began)
            if self._line:
                self._line.show(fit_parts(parts, self._line.width))
            elif logs_status and now - logged_at >= LOG_STATUS_SECONDS:
                logged_at = now
                logger.info("%s", SEPARATOR.join(part.text for part in parts))
            await asyncio.sleep(REDRAW_SECONDS)


class _LogHandler(logging.Handler):
    """Write the lines to standard error, above the status line if one is shown, within the limits for peers."""

    def __init__(self, display: Display, limit: LineLimit) -> None:
        super().__init__()
        self._display = display
        self._limit = limit

    def emit(self, record: logging.LogRecord) -> None:
        try:
            for text in self._limit.summaries(record.created):
                summary = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (), None)
                self._display.write_line(self.format(summary))
            if self._limit.admits(record):
                self._display.write_line(self.format(record))
        except Exception:  # as every handler of the standard library does
            self.handleError(record)


def configure_logs(as_json: bool = False, verbose: bool = False) -> Display:
    """Log our own packages from INFO (DEBUG if `verbose`), libraries from WARNING.

    Returns the display of standard error, which also shows the status line.
    """
    display = Display(sys.stderr, has_line=not as_json)
    handler = _LogHandler(display, LineLimit())
    handler.setFormatter(JsonFormatter() if as_json else PlainFormatter(None if verbose else display.names))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in OUR_PACKAGES:
        logging.getLogger(name).setLevel(logging.DEBUG if verbose else logging.INFO)
    for name in SILENCED_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return display

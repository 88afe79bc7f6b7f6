"""Standard error of a running node: log lines, and one status line if it is a terminal.

Without a terminal the status is a log line from time to time, and so is an activity that takes long.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TextIO

from node.monitoring.activity import REDRAW_SECONDS, ticking
from node.monitoring.peer_names import PeerNames
from node.monitoring.status import StatusSource
from node.monitoring.status_line import StatusLine, is_capable_terminal
from node.monitoring.status_text import SEPARATOR, RemainingTime, fit_parts, progress_of, status_parts

logger = logging.getLogger(__name__)

LOG_STATUS_SECONDS = 60.0  # without a terminal
SLOW_SECONDS = 5.0  # an activity that takes longer is logged where there is no terminal


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
        remaining, phase, logs_status = RemainingTime(), "", self._line is None
        logged_at = phase_began = time.monotonic()
        while True:
            status, now = source.status(), time.monotonic()
            if status.phase != phase:
                phase, phase_began = status.phase, now
            parts = status_parts(status, remaining.estimate(now, progress_of(status)), now - phase_began)
            if self._line:
                self._line.show(fit_parts(parts, self._line.width))
            elif logs_status and now - logged_at >= LOG_STATUS_SECONDS:
                logged_at = now
                logger.info("%s", SEPARATOR.join(part.text for part in parts))
            await asyncio.sleep(REDRAW_SECONDS)

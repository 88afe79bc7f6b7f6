"""One line at the bottom of a terminal that is redrawn in place, below the lines that scroll by.

A line that is wider than the terminal would wrap and could not be erased again, so it is cut. Everything that Python
writes to the terminal meanwhile passes through the line, which is erased before and drawn again after it.
"""

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from rich.cells import cell_len, chop_cells

from node.units import format_clock

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_WIDTH = 80
ERASE = "\r\x1b[2K"
DIM, NORMAL = "\x1b[2m", "\x1b[0m"
REDRAW_SECONDS = 1.0


def is_capable_terminal(stream: TextIO) -> bool:
    """Return whether a line can be redrawn on this stream."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


def fit_to_width(text: str, width: int) -> str:
    """Cut a text to at most `width` terminal cells."""
    if cell_len(text) <= width:
        return text
    return f"{chop_cells(text, max(1, width - 2))[0]}.." if width > 2 else ""


class StatusLine:
    """The line at the bottom of the terminal `stream`. Its methods may be called from any thread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.RLock()
        self._text = ""
        self._is_drawn = False
        self._is_plain = bool(os.environ.get("NO_COLOR"))
        self._streams = sys.stdout, sys.stderr

    def __enter__(self) -> Self:
        """Let standard output and standard error pass through the line, as far as they are terminals."""
        self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (_above(stream, self) for stream in self._streams)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Erase the line and give the streams back."""
        self.show("")
        sys.stdout, sys.stderr = self._streams

    @property
    def width(self) -> int:
        """Return the cells that a line may take; in the last column some terminals wrap already."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):
            columns = 0
        return (columns or DEFAULT_WIDTH) - 1

    def show(self, text: str) -> None:
        """Replace the line; an empty text removes it."""
        with self._lock:
            self._erase()
            self._text = text
            self._draw()
            self._stream.flush()

    def write_above(self, text: str, stream: TextIO | None = None) -> None:
        """Write whole lines above the status line, to its own or another stream of the same terminal."""
        with self._lock:
            self._erase()
            self._stream.flush()
            target = stream or self._stream
            target.write(text)
            target.flush()
            self._draw()
            self._stream.flush()

    def _erase(self) -> None:
        if self._is_drawn:
            self._stream.write(ERASE)
            self._is_drawn = False

    def _draw(self) -> None:
        if not self._text:
            return
        encoding = self._stream.encoding or "ascii"
        line = fit_to_width(self._text.encode(encoding, "replace").decode(encoding), self.width)
        self._stream.write(line if self._is_plain else f"{DIM}{line}{NORMAL}")
        self._is_drawn = True


class _StreamAbove:
    """Stands for a terminal stream while a status line is shown: whole lines are written above it."""

    def __init__(self, stream: TextIO, line: StatusLine) -> None:
        self._stream = stream
        self._line = line
        self._pending = ""

    def write(self, text: str) -> int:
        whole, newline, self._pending = (self._pending + text).rpartition("\n")
        if newline:
            self._line.write_above(whole + newline, self._stream)
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _above(stream: TextIO, line: StatusLine) -> Any:
    return _StreamAbove(stream, line) if stream.isatty() else stream


@contextmanager
def activity(text: str) -> Iterator[None]:
    """Show `text` and a clock at the bottom of the terminal while the body runs; nothing without a terminal."""
    with ExitStack() as stack:
        if is_capable_terminal(sys.stderr):
            line = stack.enter_context(StatusLine(sys.stderr))
            stack.enter_context(ticking(line, text))
        yield


@contextmanager
def ticking(line: StatusLine, text: str) -> Iterator[None]:
    """Show `text` and a clock on `line` while the body runs."""
    done = threading.Event()

    def tick() -> None:
        began = time.monotonic()
        while not done.is_set():
            elapsed = time.monotonic() - began
            line.show(f"{text} · {format_clock(elapsed)}" if elapsed >= REDRAW_SECONDS else text)
            done.wait(REDRAW_SECONDS)

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()


class ByteProgress:
    """Counts bytes on standard error while it is entered, and leaves nothing behind; silent without a terminal."""

    def __init__(self, action: str, total: int, console: "Console | None" = None) -> None:
        from rich.console import Console  # they are slow to import, and few commands show progress
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed

        console = console or Console(stderr=True)
        columns = (BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
        self._progress = Progress(
            TextColumn("{task.description}"), *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._progress.add_task(action, total=total or None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, count: int) -> None:
        """Count `count` bytes as done."""
        self._progress.advance(self._task, count)

    def count(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the chunks, each counted when the next one is asked for."""
        for chunk in chunks:
            yield chunk
            self.advance(len(chunk))

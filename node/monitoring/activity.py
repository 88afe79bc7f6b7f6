"""Show on a terminal what a command is doing, and for how long already. Imports nothing heavy."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from node.monitoring.status_line import StatusLine, is_capable_terminal
from node.units import format_clock

REDRAW_SECONDS = 1.0


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

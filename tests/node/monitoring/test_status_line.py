"""The status line on a pseudo terminal, seen through a small terminal emulator."""

import fcntl
import io
import logging
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Iterator

import pytest

from node.monitoring.display import OUR_PACKAGES, SILENCED_LOGGERS, Display, configure_logs
from node.monitoring.status_line import StatusLine, fit_to_width, is_capable_terminal

COLUMNS = 40


class Terminal:
    """A pseudo terminal of COLUMNS columns; `screen` shows what a person sees."""

    def __init__(self) -> None:
        self._screen_end, program_end = pty.openpty()
        fcntl.ioctl(program_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        self.stream = open(program_end, "w", encoding="utf-8")  # noqa: SIM115 - closed below
        self.output = ""

    def read(self) -> str:
        """Return all output so far."""
        self.stream.flush()
        os.set_blocking(self._screen_end, False)
        try:
            while data := os.read(self._screen_end, 1 << 16):
                self.output += data.decode()
        except BlockingIOError:
            pass
        return self.output

    def screen(self) -> list[str]:
        """Return the visible lines, with the commands `carriage return` and `erase line` carried out."""
        lines = [""]
        for word in re.split(r"(\r\n|\r\x1b\[2K|\x1b\[\d*m)", self.read()):
            if word == "\r\n":
                lines.append("")
            elif word == "\r\x1b[2K":
                lines[-1] = ""
            elif not word.startswith("\x1b"):
                assert "\x1b" not in word and "\r" not in word, repr(word)
                lines[-1] += word
        assert all(len(line) < COLUMNS or index < len(lines) - 1 for index, line in enumerate(lines)), lines
        return lines

    def close(self) -> None:
        self.stream.close()
        os.close(self._screen_end)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    yield terminal
    terminal.close()


@pytest.fixture
def loggers() -> Iterator[None]:
    """Restore the loggers after the test."""
    root, names = logging.getLogger(), ("", *OUR_PACKAGES, *SILENCED_LOGGERS)
    handlers, levels = root.handlers[:], {name: logging.getLogger(name).level for name in names}
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_line_is_redrawn_below_the_lines_and_removed_at_the_end(terminal: Terminal) -> None:
    with StatusLine(terminal.stream) as line:
        line.show("round 1 of 9")
        line.write_above("10:00:00 one\n")
        assert terminal.screen() == ["10:00:00 one", "round 1 of 9"]
        line.show("round 2")
        line.write_above("10:00:01 two\n")
        assert terminal.screen() == ["10:00:00 one", "10:00:01 two", "round 2"]
    assert terminal.screen() == ["10:00:00 one", "10:00:01 two", ""]


def test_wide_line_is_cut_because_a_wrapped_one_cannot_be_erased(terminal: Terminal) -> None:
    with StatusLine(terminal.stream) as line:
        line.show("x" * 200)
        assert terminal.screen() == ["x" * (COLUMNS - 3) + ".."]
    assert terminal.screen() == [""]
    assert fit_to_width("\u4e2d" * 30, 10) == "\u4e2d" * 4 + ".."  # each takes two cells


def test_prints_pass_above_the_line(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    with StatusLine(terminal.stream) as line:
        line.show("below")
        print("above", "it")
        sys.stderr.write("half ")
        sys.stderr.write("a line\n")
        assert terminal.screen() == ["above it", "half a line", "below"]
    assert sys.stdout is terminal.stream and sys.stderr is terminal.stream
    print("afterwards")
    assert terminal.screen() == ["above it", "half a line", "afterwards", ""]


def test_log_lines_and_an_activity_share_the_terminal(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, loggers: None
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    with configure_logs() as display:
        with display.activity("loading"):
            while "loading" not in terminal.read():
                pass
            logging.getLogger("node").info("ready")
        assert terminal.screen()[0].endswith("ready") and terminal.screen()[-1].startswith("loading")
    logging.getLogger("node").info("done")
    assert [line[9:] for line in terminal.screen()] == ["ready", "done", ""]


@pytest.mark.parametrize("variable", ["TERM=dumb", "NO_COLOR=1"])
def test_dumb_terminals_and_no_color_are_respected(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(*variable.split("="))
    assert is_capable_terminal(terminal.stream) == (variable == "NO_COLOR=1")
    with Display(terminal.stream) as display, display.activity("working"):
        display.write_line("a line")
    assert "\x1b[2m" not in terminal.read()
    assert "\x1b" not in terminal.read() or variable == "NO_COLOR=1"


def test_pipe_gets_no_control_characters() -> None:
    pipe = io.StringIO()
    with Display(pipe) as display, display.activity("working"):
        display.write_line("a line")
    assert pipe.getvalue() == "a line\n"

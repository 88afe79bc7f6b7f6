"""`murmur join` on a pseudo terminal: what a person sees during a short run, and what stays on the screen."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections import Counter
from pathlib import Path

import pytest

from tests.swarm.process_swarm import join_command, manifest_with, write_run

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

COLUMNS = 72
PEER_ID = re.compile("12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")


def run_on_terminal(command: list[str]) -> tuple[int, str]:
    """Run a command on a terminal of COLUMNS columns; return its exit code and all that it wrote."""
    screen_end, program_end = pty.openpty()
    fcntl.ioctl(program_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=program_end, stderr=program_end, env=environment
    )
    os.close(program_end)
    written = b""
    try:
        while data := os.read(screen_end, 1 << 16):
            written += data
    except OSError:  # Linux's way to say that nobody can write any more
        pass
    os.close(screen_end)
    return process.wait(), written.decode()


def screen_of(text: str) -> list[str]:
    """Return the lines that stay visible."""
    lines = [""]
    for word in re.split(r"(\r\n|\r\x1b\[2K|\x1b\[\d*m)", text):
        if word == "\r\n":
            lines.append("")
        elif word == "\r\x1b[2K":
            lines[-1] = ""
        elif not word.startswith("\x1b"):
            lines[-1] += word
    return lines


def test_run_on_a_terminal_has_one_status_line_and_one_log_line_a_round(tmp_path: Path) -> None:
    run = write_run(tmp_path, manifest_with(target={"rounds": 6}, run={"min_peers": 1}))
    command = join_command(run, tmp_path / "node", "--name", "mary")
    code, text = run_on_terminal(command)
    assert code == 0, text
    drawn = re.findall(r"\x1b\[2m(.*?)\x1b\[0m", text)
    assert all(len(line) < COLUMNS for line in drawn) and len(set(drawn)) > 3, drawn
    assert any(line.startswith("loading PyTorch") for line in drawn)
    assert any(re.match(r"round \d/6 · ", line) for line in drawn)
    lines = screen_of(text)
    assert lines[-1] == "" and not any("\x1b" in line or line in drawn for line in lines), lines
    rounds = Counter(re.findall(r"^\d\d:\d\d:\d\d round (\d+): ", "\n".join(lines), re.MULTILINE))
    assert rounds == {str(number): 1 for number in range(1, 7)}
    assert any(re.search(r"this node is mary \(12D3\.\..{6}\)", line) for line in lines)
    logged = [line for line in lines if re.match(r"\d\d:\d\d:\d\d ", line)]
    assert not any(PEER_ID.search(line) or "[node." in line for line in logged), logged
    print("\n".join(lines))

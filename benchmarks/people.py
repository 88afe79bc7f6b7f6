"""People with machines, as the benchmarks of a newcomer and of a whole life play them."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MURMUR = (sys.executable, "-P", "-m", "node.cli")
PAGE_LINE = re.compile(r"^page +(\S+)/$", re.MULTILINE)
PATIENCE = 600.0
END_SECONDS = 10.0  # in which a page may still show the work of peers that have ended
POLL_SECONDS = 0.2


@dataclass
class Person:
    """A person with a machine: a home folder, and what the commands there printed."""

    name: str
    home: Path
    transcript: list[tuple[str, Path]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True)

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a command of murmur; its output goes to a file of the transcript."""
        output = self.home / f"output-{len(self.transcript)}"
        self.transcript.append((" ".join(("murmur", *words)), output))
        environment = {**os.environ, "HOME": str(self.home)}
        environment.pop("XDG_STATE_HOME", None)
        with output.open("wb") as file:
            return subprocess.Popen(
                [*MURMUR, *words], stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, cwd=self.home
            )

    def run(self, *words: str) -> str:
        """Run a command to its end; return its output. Raises RuntimeError if it fails."""
        process = self.start(*words)
        code = process.wait(PATIENCE)
        if code != 0:
            raise RuntimeError(f"murmur {' '.join(words)} ended with {code}: {self.last_output()}")
        return self.last_output()

    def last_output(self) -> str:
        return self.transcript[-1][1].read_text()


def wait_for(condition: Callable[[], bool], what: str, workers: Sequence[subprocess.Popen[bytes]] = ()) -> float:
    """Wait until the condition holds; return the seconds that it took.

    Raises:
        TimeoutError: it does not hold in time.
        RuntimeError: all of the workers have ended, so it never will.
    """
    began = alive = time.monotonic()
    while not condition():
        if not workers or any(worker.poll() is None for worker in workers):
            alive = time.monotonic()
        elif time.monotonic() - alive > END_SECONDS:
            raise RuntimeError(f"all have ended, with {[worker.returncode for worker in workers]}: {what}")
        if time.monotonic() - began > PATIENCE:
            raise TimeoutError(f"not in {PATIENCE:g} s: {what}")
        time.sleep(POLL_SECONDS)
    return time.monotonic() - began


def find_page(host: Person) -> str:
    """Return the address that a host has printed for its page, without the last slash."""
    wait_for(lambda: PAGE_LINE.search(host.last_output()) is not None, "the host prints the address of its page")
    found = PAGE_LINE.search(host.last_output())
    assert found is not None
    return found[1]


def stop_all(running: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()

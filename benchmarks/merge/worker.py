"""A peer of a benchmark as a process of its own, and the lines of JSON in which it is told what to do.

The peer says `{"address": ...}`, hears `{"addresses": [...]}` of all, and then answers one order after the other:
`prepare` (not measured), `go` (measured), `settle` (what is left of it to do) and `check`. Output of its libraries
goes to stderr.
"""

import argparse
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import psutil

START_SECONDS = 120.0
REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}  # two threads a peer, or small pages, are slower
SHARED_MEMORY = Path("/dev/shm")
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class SilentError(Exception):
    """A peer ended, or said nothing in time; its text holds the peer's last words."""


class OrderChannel:
    """The peer's side."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def receive(self) -> dict[str, Any]:
        """EOFError once nobody speaks any more."""
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        order: dict[str, Any] = json.loads(line)
        return order

    def send(self, **values: object) -> None:
        self._replies.write(json.dumps(values) + "\n")


class Worker:
    """The other side."""

    def __init__(self, module: str, words: Iterable[str]) -> None:
        command = [sys.executable, "-m", module, *words]
        self._stack = ExitStack()
        # Its own, as it is killed in the end; short, as paths of sockets must be.
        folder = tempfile.TemporaryDirectory(prefix="mm", dir="/tmp", ignore_cleanup_errors=True)
        temporary = self._stack.enter_context(folder)
        self._errors = self._stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115 - the stack closes it
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=REPOSITORY,
            env=os.environ | ENVIRONMENT | {"TMPDIR": temporary},
            process_group=0,  # in one session: between sessions the kernel forgets who is to go first
            preexec_fn=die_with_parent,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._listener = threading.Thread(target=self._read_lines, daemon=True)
        self._listener.start()

    def send(self, **values: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(values) + "\n")
        self._process.stdin.flush()

    def receive(self, seconds: float = START_SECONDS) -> dict[str, Any]:
        """SilentError where it ended, or says nothing for so long."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            line = ""
        if not line:
            raise SilentError(f"a peer said nothing for {seconds:g} s or ended:\n{self.stderr_tail()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def request(self, seconds: float = START_SECONDS, **order: object) -> dict[str, Any]:
        self.send(**order)
        return self.receive(seconds)

    def processor_seconds(self) -> float:
        """Of it and all its children, so far."""
        parent = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in [parent, *parent.children(recursive=True)]]
        return sum(time.user + time.system for time in times)

    def stderr_tail(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-4000:]

    def stop(self) -> None:
        """Kill it and all its children."""
        with self._stack, self._process, suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._process.pid)
            for process in [*parent.children(recursive=True), parent]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
                for left in SHARED_MEMORY.glob(f"torch_{process.pid}_*"):  # hivemind's, where nobody lives to remove it
                    left.unlink()
            self._listener.join()

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")


class Team:
    """Peers that merge with one another."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers

    def introduce(self) -> None:
        addresses = [worker.receive()["address"] for worker in self.workers]
        self.request_all(addresses=addresses)

    def request_all(self, seconds: float = START_SECONDS, **order: object) -> list[dict[str, Any]]:
        """All are told; their answers."""
        for worker in self.workers:
            worker.send(**order)
        return [worker.receive(seconds) for worker in self.workers]

    def merge(self, seconds: float = START_SECONDS) -> float:
        """Once all are prepared: seconds until the last one has the new anchor. SilentError where not all took part."""
        begun = time.monotonic()
        members = min(answer["members"] for answer in self.request_all(seconds, go=True))
        taken = time.monotonic() - begun
        if members < len(self.workers):
            raise SilentError(f"{members} of {len(self.workers)} peers took part")
        self.request_all(settle=True)
        return taken

    def processor_seconds(self) -> float:
        return sum(worker.processor_seconds() for worker in self.workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()


def peer_parser() -> argparse.ArgumentParser:
    """The words that every peer is given; each kind adds its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--peers", type=int)
    parser.add_argument("--address", help="of this machine, for the others")
    return parser


def die_with_parent() -> None:
    """To be called in a child that was just forked."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def to_command_line(options: Mapping[str, object]) -> list[str]:
    """As a command line has them."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]

"""The node of a training loop: `murmur join RUN --own-loop`, in a process that outlives the loop."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from node.monitoring.status import NodeStatus
from node.paths import read_metrics_port
from node.processes.process import python_environment
from node.run_dir import is_locked, read_json_if_whole
from node.trainer.ipc.own_loop import connect_loop
from protocol.errors import AlreadyRunningError, error_with_code

START_SECONDS: Final = 300.0  # as `murmur up` waits for its first peer
END_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.1
LOG: Final = "daemon.log"
TAIL_BYTES: Final = 4096
STATUS_SECONDS: Final = 1.0
MAX_STATUS_BYTES: Final = 2**20
LAST_LINES: Final = ("the run is over", "model: ", "to get the model", "your part", "your receipt")


def tell(line: str) -> None:
    """Print a line for the person who runs the script."""
    print(f"murmuration: {line}", file=sys.stderr, flush=True)


class NodeProcess:
    """The node in a folder, started by this loop or by an earlier one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def connect(self, run: str, arguments: Sequence[str]) -> tuple[socket.socket, list[int]]:
        """Connect to the node, and start it where none runs; return connection and descriptors of the memory.

        Raises MurmurError with the node's own line if it does not start.
        """
        try:
            connected = self._connect()
        except TimeoutError as error:
            text = f"another training loop is connected to the node in {self.folder}; give this one its own folder"
            raise AlreadyRunningError(text) from error
        if connected is not None:
            return connected
        tell(f"starting a node in {self.folder}; its log is daemon.log there")
        self._start(run, arguments)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                if connected := self._connect():
                    return connected
            self._require_running()
            time.sleep(POLL_SECONDS)
        self.end()
        raise AlreadyRunningError(f"the node in {self.folder} does not answer: {self.last_line()}")

    def _connect(self) -> tuple[socket.socket, list[int]] | None:
        """Connect to a node; None if none listens. Raises TimeoutError if it has another loop."""
        try:
            return connect_loop(self.folder)
        except TimeoutError:
            raise
        except OSError:
            return None

    def end(self) -> None:
        """Let the node leave the run, and wait for it."""
        if self._process is not None:
            if self._process.poll() is not None:
                return
            pid = self._process.pid  # also of a node that is still starting and holds no lock
        elif not is_locked(self.folder):  # the process id of a node that has ended may be another program's
            return
        else:
            pid = int(read_json_if_whole(self.folder / "node.json").get("pid", 0))
        if pid > 0:
            os.kill(pid, signal.SIGTERM)
        self._has_ended_within(END_SECONDS)

    def _has_ended_within(self, seconds: float) -> bool:
        """Wait for the end of the node; return whether it came in time."""
        deadline = time.monotonic() + seconds
        while self._is_running():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def status(self) -> NodeStatus | None:
        """Return what the node is doing; None if it does not answer at once."""
        port = read_metrics_port(self.folder)
        if port is None:
            return None
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=STATUS_SECONDS)
        try:
            connection.request("GET", "/status")
            return NodeStatus.model_validate_json(connection.getresponse().read(MAX_STATUS_BYTES))
        except (OSError, http.client.HTTPException, ValidationError):
            return None
        finally:
            connection.close()

    def last_lines(self, seconds: float) -> list[str]:
        """Wait for the end of the node, and return its lines about the end of the run; none if it goes on."""
        if not self._has_ended_within(seconds):
            return []
        try:
            tail = (self.folder / LOG).read_bytes()[-TAIL_BYTES:]
        except OSError:
            return []
        lines = tail.decode(errors="replace").splitlines()
        starts = [number for number, line in enumerate(lines) if line.startswith(LAST_LINES[0])]
        return [line for line in lines[starts[-1] :] if line.startswith(LAST_LINES)] if starts else []

    def last_line(self) -> str:
        """Return the last line of the node's log."""
        try:
            tail = (self.folder / LOG).read_bytes()[-TAIL_BYTES:]
        except OSError:
            return "it left no log"
        lines = [line for line in tail.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip().removeprefix("murmur: ") if lines else "it said nothing"

    def _start(self, run: str, arguments: Sequence[str]) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [sys.executable, "-m", "node.cli", "join", run, "--own-loop", "--dir", str(self.folder), *arguments]
        with (self.folder / LOG).open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=python_environment(),
                start_new_session=True,  # a terminal's Ctrl-C must reach the loop alone
            )

    def _require_running(self) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise error_with_code(code, self.last_line())

    def _is_running(self) -> bool:
        return is_locked(self.folder) if self._process is None else self._process.poll() is None

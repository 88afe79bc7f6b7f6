"""One peer of a local swarm: a `murmur join` process in its own process group, observed through its /status."""

import contextlib
import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from node.commands.up.swarm_summary import PeerProcessState, PeerSummary, PeerTotals
from node.monitoring.status import NodeStatus, fetch_status
from node.processes.process import python_environment
from protocol.errors import StorageError, UnreachableError

STATUS_SECONDS = 2.0
LOG_TAIL_BYTES = 4096
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class PeerProcess:
    """A peer process; `command` starts it, with `--peer ADDRESS` appended for each bootstrap address."""

    def __init__(self, name: str, folder: Path, command: Sequence[str]) -> None:
        self.name = name
        self.folder = folder
        self.totals = PeerTotals({})
        self.status: NodeStatus | None = None
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def returncode(self) -> int | None:
        """Return the exit code; `None` while it runs or has never run, negative for the signal that killed it."""
        return self._process.poll() if self._process else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, bootstrap: Sequence[str]) -> None:
        """Start the process, which connects to these addresses first."""
        self.status = None
        self._started_at = time.time()
        peer_options = [argument for address in bootstrap for argument in ("--peer", address)]
        with self._open_log() as log:
            self._process = subprocess.Popen(
                [*self._command, *peer_options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=python_environment(),
                start_new_session=True,
                preexec_fn=functools.partial(_die_with_parent, os.getpid()),
            )

    async def poll(self) -> None:
        """Fetch the peer's status; keep the last one if it does not answer."""
        if self._process is None:
            return
        if not self.is_running:
            self._record_status(self._read_final_status())
            return
        port = self.read_node_info().get("metrics_port")
        if isinstance(port, int):
            with contextlib.suppress(UnreachableError):  # keep the last status
                self._record_status(await fetch_status(port, STATUS_SECONDS))

    def read_node_info(self) -> dict[str, object]:
        """Return the content of node.json if the current process wrote it, otherwise an empty dict."""
        try:
            values = json.loads((self.folder / "node.json").read_bytes())
        except (OSError, ValueError):
            return {}
        is_current = isinstance(values, dict) and self._process is not None and values.get("pid") == self._process.pid
        return values if is_current else {}

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of the running process."""
        found = self.read_node_info().get("addresses", ())
        return tuple(map(str, found)) if isinstance(found, list) else ()

    def summary(self) -> PeerSummary:
        """Return the peer's current summary."""
        return PeerSummary(self.name, self._state(), self.status, self.totals.bytes_sent)

    def interrupt(self) -> None:
        """Ask the process to leave gracefully."""
        if self._process and self.is_running:
            self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill the whole process group with SIGKILL."""
        if self._process and self.is_running:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=10)

    def log_tail(self, lines: int = 6) -> list[str]:
        """Return the last lines of the log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - LOG_TAIL_BYTES))
                return file.read().decode(errors="replace").splitlines()[-lines:]
        except OSError:
            return []

    def _state(self) -> PeerProcessState:
        if self.is_running:
            return "running" if self.status else "starting"
        if self._process is None:
            return "starting"
        return "ended" if self.returncode == 0 else "lost"

    def _record_status(self, status: NodeStatus | None) -> None:
        if status is not None:
            self.status = status
            self.totals.record(status)

    def _read_final_status(self) -> NodeStatus | None:
        """Return the status that the process wrote when it ended; `None` if an earlier process wrote it."""
        try:
            status = NodeStatus.model_validate_json((self.folder / "status.json").read_bytes())
        except (OSError, ValidationError):
            return None
        return status if status.since >= self._started_at else None

    def _open_log(self) -> IO[bytes]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            log = self.log.open("ab")
            log.write(f"--- {self.name} starts at {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
            log.flush()
        except OSError as error:
            raise StorageError(f"cannot write {self.log}: {error.strerror}; choose another --dir") from error
        return log


def _die_with_parent(parent: int) -> None:
    """Ask the kernel to kill the child when the parent dies; runs in the child before exec."""
    if sys.platform == "linux":
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

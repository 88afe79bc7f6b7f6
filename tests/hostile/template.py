"""A process that has imported a node and its trainer, and forks real peers of them: in a second instead of ten.

`Template` starts it and asks it, by one JSON line each, to fork a child that calls a function. Each child is a process
with a session, a log and file descriptors of its own. A child that becomes a node forks the process of its trainer
first, while it has no thread yet; the daemon then hands over the channel and the shared memory (see `trainers`).
"""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from node.processes.process import python_environment

PR_SET_PDEATHSIG = 1
DEAD_SECONDS = 10.0


class ForkedProcess:
    """A child of the template, with the methods of `subprocess.Popen` that a test needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        """Return `None` while it runs; its exit code is not known here, so 0 afterwards."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return 0
        return None

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill its whole session; its trainer dies with it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = DEAD_SECONDS) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} did not end in {timeout:g} s")
            time.sleep(0.01)
        return 0


class Template:
    """The template process; it and all that it forked die with this process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile.template"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=python_environment() | {"OMP_NUM_THREADS": "1"},
            preexec_fn=die_with_parent,
        )
        self._read_line()  # it has imported everything

    def fork(self, target: str, arguments: Sequence[Any], log: Path, niceness: int = 0) -> ForkedProcess:
        """Fork a child that calls `target`, a `module:function`, with these arguments."""
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        request = {"target": target, "arguments": list(arguments), "log": str(log), "niceness": niceness}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return ForkedProcess(int(self._read_line()))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the template process has ended with {self._process.poll()}")
        return line


def die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Import everything, then fork a child for each line of the standard input."""
    _import_all()
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"the template has {threads} threads; a fork would lose them")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(request)
        print(pid, flush=True)


def _import_all() -> None:
    for module in ("node.daemon.lifecycle", "node.commands.join.command", "node.cli", "node.trainer.loop",
                   "node.data.check", "node.commands.join.finished_run", "node.daemon.receipts.commit_log",
                   "tests.hostile.peers"):  # fmt: skip
        importlib.import_module(module)
    from optim.compose import compose
    from optim.kernels.warmup import warm_up

    warm_up(compose("diloco", {}))


def _become(request: Mapping[str, Any]) -> None:
    """Run the target of a request in this child, and exit."""
    code = 1
    try:
        os.setsid()
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.nice(request["niceness"])
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        module, _, function = request["target"].partition(":")
        getattr(importlib.import_module(module), function)(*request["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()

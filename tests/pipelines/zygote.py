"""A process that has imported everything, and forks the processes of a test: 10 ms instead of 2 s of imports.

A request is one line of JSON on a Unix socket, with file descriptors: the module whose `main(words, fds)` the child
runs, its words, and the file for its output. The answer is the child's process id.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

MAX_FDS, MAX_REQUEST_BYTES = 4, 65536
MODULES = ("tests.pipelines.peer", "tests.pipelines.tally_trainer")
REPOSITORY = Path(__file__).parents[2]


def fork(path: str, module: str, words: dict[str, Any], output: Path, fds: Sequence[int] = ()) -> int:
    """Let the zygote at `path` fork a child; return its process id."""
    request = json.dumps({"module": module, "words": words, "output": str(output)}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        socket.send_fds(connection, [request], list(fds))
        return int(connection.recv(32))


class Zygote:
    """The zygote and its socket; `stop` kills it. Its children are killed by those that asked for them."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "zygote")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(folder)}
        command = [sys.executable, "-m", "tests.pipelines.zygote", self.path]
        self._process = subprocess.Popen(command, env=environment, cwd=REPOSITORY, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise AssertionError("the zygote has not started")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        with self._process:
            self._process.kill()


def main() -> None:
    modules = {name: importlib.import_module(name) for name in MODULES}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the children
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                body, fds, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, MAX_FDS)
                request = json.loads(body)
                child = os.fork()
                if child == 0:
                    connection.close()
                    listener.close()
                    _run(modules[request["module"]], request, fds)
                for fd in fds:
                    os.close(fd)
                with contextlib.suppress(OSError):
                    connection.send(str(child).encode())


def _run(module: Any, request: dict[str, Any], fds: list[int]) -> None:
    """Be the child, and never return."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        module.main(request["words"], fds)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()

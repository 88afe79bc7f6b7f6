"""`python -m node.task_scorer SOCKET MODULE TASK`: score answers by a task of a module that the user allowed.

Each request and each reply is one line of JSON. While the task looks at an answer, the kernel ends this process after
some seconds, and executing text or starting a program is refused. A module that means harm can evade this: it has all
rights of the node. A careless scorer, such as one by `eval`, runs nothing of a stranger's model.
"""

import contextlib
import json
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from node.own_modules import load_module
from node.own_tasks import CPU_SECONDS, WALL_SECONDS
from protocol.errors import ComponentError
from protocol.scored_tasks import Question, ScoredTask, tasks_in

MAX_MEMORY: Final = 4 << 30  # bytes of private memory
REFUSED: Final = frozenset(
    {
        "exec", "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty",
        "subprocess.Popen", "socket.connect",
    }
)  # fmt: skip
EXECUTES: Final = "executes an answer, or imports a module while it scores"


class Guard:
    """Refuses events of the interpreter (`sys.addaudithook`) while it is closed; `seen` says that there was one."""

    def __init__(self) -> None:
        self._is_closed = False
        self.seen = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, _: object) -> None:
        if self._is_closed and event in REFUSED:
            self.seen = True
            raise PermissionError(f"{event} is refused while an answer is scored")

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Refuse the events, and let the kernel end this process if this takes too long."""
        self.seen = False
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
        self._is_closed = True
        try:
            yield
        finally:
            self._is_closed = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)


def main(arguments: list[str]) -> None:
    """Answer requests until the connection ends."""
    number, line, name = arguments
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    with socket.socket(fileno=int(number)) as connection, connection.makefile("rwb", buffering=0) as pipe:
        guard = Guard()
        try:
            task = next(kind() for kind in tasks_in(load_module(line)) if kind.name == name)
        except (ComponentError, StopIteration) as error:
            _reply(pipe, {"fault": str(error) or f"the module has no task {name}"})
            return
        _reply(pipe, {})
        for request in connection.makefile("rb"):
            _reply(pipe, answer(task, guard, json.loads(request)))


def _reply(pipe: Any, reply: dict[str, object]) -> None:
    pipe.write(json.dumps(reply).encode() + b"\n")


def answer(task: ScoredTask, guard: Guard, request: dict[str, Any]) -> dict[str, object]:
    """Score an answer, or make a question; a fault of the task is part of the reply."""
    try:
        if "number" in request:
            return {"made": asdict(task.question(request["run"], request["number"]))}
        asked = request["question"]
        question = Question(asked["task"], asked["prompt"], tuple(asked["solution"]))
        with guard.closed():
            score = task.score(question, request["text"])
    except Exception as error:
        return {
            "fault": EXECUTES if guard.seen else f"raises {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        }
    if guard.seen:
        return {"fault": EXECUTES}
    is_number = isinstance(score, int | float)
    return {"score": float(score)} if is_number else {"fault": f"returns {type(score).__name__}, no number"}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which closes the connection
    main(sys.argv[1:])

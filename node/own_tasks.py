"""Tasks of a run's own modules: their questions here, their scores in a process apart.

A scorer reads texts of a model, and was written by people who did not think of every answer. So it runs in a process
of its own (`python -m node.task_scorer`), which the kernel ends after some seconds of one answer, and which refuses to
execute text meanwhile. An answer that cannot be scored has the score 0; the trainer goes on.
"""

import functools
import json
import logging
import math
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Final

from node.own_modules import load_module
from node.processes.process import python_environment
from protocol.errors import ComponentError, ManifestError
from protocol.manifest.run import Manifest
from protocol.scored_tasks import TASKS, Draws, Question, ScoredTask, tasks_in

logger = logging.getLogger(__name__)

MODULE: Final = "node.task_scorer"
START_SECONDS: Final = 120.0  # the module may import large libraries
CPU_SECONDS: Final = 2.0  # of one answer, after which the kernel ends the process
WALL_SECONDS: Final = 10.0  # of one answer that waits instead
REPLY_SECONDS: Final = WALL_SECONDS + 5.0  # after which we end it
MAX_REPLY_BYTES: Final = 1 << 20
TOO_LONG: Final = f"takes more than {CPU_SECONDS:g} s for an answer, or ends its process"


def require_task(manifest: Manifest) -> None:
    """Raise ManifestError if no module of the run has the task that [rl] names, or another version of it."""
    if manifest.rl is None:
        return
    task = known_tasks(manifest.method.modules).get(manifest.rl.task)
    if task is None:
        text = f"rl.task: no module of the run has the task {manifest.rl.task}; name one in method.modules"
        raise ManifestError(text, ("rl", "task"))
    if task.version != manifest.rl.version:
        raise ManifestError(f"rl.version: the task {task.name} has version {task.version}; write it", ("rl", "version"))


@functools.lru_cache(maxsize=16)
def known_tasks(modules: tuple[str, ...]) -> Mapping[str, ScoredTask]:
    """Return our tasks and those of a run's modules by name.

    Raises ComponentError if this machine lacks a module, or two tasks have one name.
    """
    found = dict(TASKS)
    for line in modules:
        for kind in tasks_in(load_module(line)):
            if fault := declaration_fault(kind):
                raise ComponentError(f"{line.partition(' ')[0]}.{kind.__name__}: {fault}")
            if kind.name in found:
                raise ComponentError(f"there are two tasks {kind.name!r}; rename yours")
            found[kind.name] = GuardedTask(kind(), line)
    return found


def declaration_fault(kind: type[ScoredTask]) -> str:
    """Return the fault in the declaration of a task; empty if there is none."""
    if not isinstance(kind.name, str) or not kind.name.replace("-", "").replace("_", "").isalnum():
        return 'it needs a name of letters, digits, - and _: name = "..."'
    if not isinstance(kind.version, int) or not 1 <= kind.version <= 1000:
        return "its version must be a whole number from 1 to 1000"
    try:
        kind()
    except Exception as error:
        return f"{kind.__name__}() fails, and a task has no options: {type(error).__name__}: {error}"
    return ""


class GuardedTask(ScoredTask):
    """A task whose scores come from a process of its own, and are 0 where they fail."""

    def __init__(self, task: ScoredTask, line: str) -> None:
        self.name = task.name
        self.version = task.version
        self._task = task
        self._scorer = TaskScorer(line, task.name)
        self.failures = 0

    def question(self, run: str, number: int) -> Question:
        return replace(self._task.question(run, number), task=self.name)

    def make(self, draws: Draws) -> Question:
        return self._task.make(draws)

    def right_answer(self, question: Question) -> str:
        return self._task.right_answer(question)

    def score(self, question: Question, text: str) -> float:
        score, fault = self._scorer.score(question, text)
        if fault:
            self.failures += 1
            if self.failures & (self.failures - 1) == 0:  # a line for the first, second, fourth, eighth...
                logger.warning("the scorer of %s %s; such answers count 0 (%d so far)", self.name, fault, self.failures)
        return score

    def score_answer(self, question: Question, answer: str) -> float:
        return self.score(question, answer)


class TaskScorer:
    """The process that scores answers of one task, started with the first of them and again after each failure.

    Args:
        line: of the module, as manifests name it.
        environment: variables of the process, added to our own.
    """

    def __init__(self, line: str, task: str, environment: Mapping[str, str] | None = None) -> None:
        self._command = [line, task]
        self._environment = environment or {}
        self._connection: socket.socket | None = None
        self._end: weakref.finalize[Any, Any] | None = None

    def score(self, question: Question, text: str) -> tuple[float, str]:
        """Return the score and an empty text, or 0 and the fault. Raises ComponentError if it does not start."""
        reply = self._ask({"question": asdict(question), "text": text})
        if reply is None:
            return 0.0, TOO_LONG
        score, fault = reply.get("score"), str(reply.get("fault", ""))
        if fault or not isinstance(score, float) or not (math.isfinite(score) and 0 <= score <= 1):
            return 0.0, fault or f"returns {score!r} where a number from 0 to 1 belongs"
        return score, ""

    def question(self, run: str, number: int) -> Question | None:
        """Return a question as the process makes it; None if it fails."""
        reply = self._ask({"run": run, "number": number})
        if reply is None or reply.get("fault"):
            return None
        made = dict(reply["made"])
        return Question(made["task"], made["prompt"], tuple(made["solution"]))

    def close(self) -> None:
        """End the process."""
        if self._end is not None:
            self._end()
        self._connection = self._end = None

    def _ask(self, request: Mapping[str, object]) -> dict[str, Any] | None:
        """Send a request; returns the reply, None if there is none in time, after which the process is gone."""
        connection = self._connection or self._start()
        try:
            connection.settimeout(REPLY_SECONDS)
            connection.sendall(json.dumps(request).encode() + b"\n")
            return _read_reply(connection, REPLY_SECONDS)
        except (OSError, ValueError):
            self.close()
            return None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno()), *self._command],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()], env={**python_environment(), **self._environment}, process_group=0,
            )  # fmt: skip
        self._connection, self._end = ours, weakref.finalize(self, _end_process, process, ours)
        try:
            ready = _read_reply(ours, START_SECONDS)
        except (OSError, ValueError) as error:
            ready = {"fault": f"{self._command[0].partition(' ')[0]}: its scorer does not start: {error}"}
        if ready.get("fault"):
            self.close()
            raise ComponentError(str(ready["fault"]))
        return ours


def _end_process(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


def _read_reply(connection: socket.socket, seconds: float) -> dict[str, Any]:
    """Read one line of JSON. Raises OSError or ValueError if none comes in time."""
    deadline, received = time.monotonic() + seconds, b""
    while not received.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(1 << 16)
        received += piece
        if not piece or len(received) > MAX_REPLY_BYTES:
            raise ValueError("the process ended")
    reply = json.loads(received)
    if not isinstance(reply, dict):
        raise ValueError("no reply of ours")
    return reply

"""Run a daemon's work apart from its event loop: in threads, in child processes, and in background tasks of the loop.

A background task is referenced until it ends, and an unexpected error in it ends the node.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from node.processes.process import LOW_PRIORITY_NICENESS, lower_priority, python_environment

logger = logging.getLogger(__name__)
RunInThread = Callable[..., Awaitable[Any]]  # calls a function with arguments in a thread
NICENESS = 15
OUT_OF_MEMORY_SCORE = Path("/proc/self/oom_score_adj")


@dataclass(frozen=True)
class Workers:
    """Two threads, each of which runs one function at a time.

    `compute` is for work that a round or the trainer waits for, `low_priority` for all other work.
    """

    compute: RunInThread
    low_priority: RunInThread


@contextmanager
def start_workers() -> Iterator[Workers]:
    """Start the two threads; leaving the context waits until they are done."""
    with (
        ThreadPoolExecutor(1, thread_name_prefix="compute") as compute,
        ThreadPoolExecutor(
            1, thread_name_prefix="low-priority", initializer=lower_priority, initargs=(LOW_PRIORITY_NICENESS,)
        ) as low_priority,
    ):
        yield Workers(_run_in(compute), _run_in(low_priority))


def _run_in(pool: Executor) -> RunInThread:
    async def run(function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)

    return run


class FaultSink(Protocol):
    def fail(self, error: BaseException) -> None:
        """End the node because of an error in our own code."""


class BackgroundTasks:
    """Tasks that nobody awaits. They handle expected errors themselves; other errors go to `faults`."""

    def __init__(self, faults: FaultSink) -> None:
        self._faults = faults
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def cancel_all(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a background task failed", exc_info=error)
            self._faults.fail(error)


@dataclass(frozen=True)
class ChildResult:
    """The end of a child: its exit code, its standard output, and the last line of its standard error."""

    exit_code: int
    output: bytes
    last_error: str


async def run_module(module: str, arguments: Sequence[str], seconds: float) -> ChildResult:
    """Run `python -m MODULE ARGUMENTS` to its end; the child is killed at the deadline and on cancellation.

    A terminal's Ctrl-C reaches this process alone. Raises TimeoutError, or OSError if the child cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=python_environment(), process_group=0,
    )  # fmt: skip
    try:
        async with asyncio.timeout(seconds):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    assert process.returncode is not None
    last_error = errors.decode(errors="replace").strip().rpartition("\n")[2]
    return ChildResult(process.returncode, output, last_error)


def give_way() -> None:
    """Lower the priority of this process, and let the kernel end it first when memory is short."""
    lower_priority(NICENESS)
    with contextlib.suppress(OSError):
        OUT_OF_MEMORY_SCORE.write_text("1000")

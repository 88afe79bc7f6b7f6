"""The threads in which a daemon computes, beside the one that talks with others.

Work that nobody waits for: held until it ends, and heard of where it breaks.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from node.process import LOW_PRIORITY_NICENESS, lower_priority

RunInThread = Callable[..., Awaitable[Any]]  # calls a function with arguments in a thread


@dataclass(frozen=True)
class Workers:
    """Each does one thing after the other. `arithmetic`: what a round or a trainer waits for. `aside`: what nobody
    does, behind all the rest."""

    compute: RunInThread
    low_priority: RunInThread


@contextmanager
def start_workers() -> Iterator[Workers]:
    """Leaving waits for what they are at."""
    with (
        ThreadPoolExecutor(1, thread_name_prefix="arithmetic") as arithmetic,
        ThreadPoolExecutor(
            1, thread_name_prefix="aside", initializer=lower_priority, initargs=(LOW_PRIORITY_NICENESS,)
        ) as aside,
    ):
        yield Workers(_run_in(arithmetic), _run_in(aside))


def _run_in(pool: Executor) -> RunInThread:
    async def work(function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)

    return work


logger = logging.getLogger(__name__)


class FaultSink(Protocol):
    def fail(self, error: BaseException) -> None:
        """Take note of a fault in our own code, which ends the node."""


class BackgroundTasks:
    """Tasks that nobody waits for. Errors that their work expects are handled there; others go to `faults`."""

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
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("something broke in the background", exc_info=error)
            self._faults.fail(error)

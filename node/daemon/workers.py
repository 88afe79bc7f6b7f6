"""The threads in which a daemon computes, beside the one that talks with others."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from node.priority import LOW_PRIORITY_NICENESS, lower_priority

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
        ThreadPoolExecutor(1, thread_name_prefix="aside", initializer=lower_priority, initargs=(LOW_PRIORITY_NICENESS,)) as aside,
    ):
        yield Workers(_run_in(arithmetic), _run_in(aside))


def _run_in(pool: Executor) -> RunInThread:
    async def work(function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)

    return work

"""Asyncio tasks that run together or again and again."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, NoReturn

Sleep = Callable[[float], Awaitable[None]]


async def cancel_and_wait(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until all have ended, ignoring their outcomes."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def run_until_one_ends(*endless: Coroutine[Any, Any, Any]) -> None:
    """Run coroutines until one ends, and cancel the others. Raises its error."""
    tasks = [asyncio.create_task(each) for each in endless]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task
    finally:
        await cancel_and_wait(tasks)


async def run_periodically(
    seconds: float | Callable[[], float],
    work: Callable[[], Awaitable[object] | None],
    *,
    sleep: Sleep | None = None,
) -> NoReturn:
    """Call `work` at once and then after every pause, until cancelled or until it raises.

    Args:
        seconds: the pause after each call, or a function that returns the next pause.
        work: a function or a coroutine function.
        sleep: for tests; `asyncio.sleep` by default.
    """
    while True:
        pending = work()
        if pending is not None:
            await pending
        await (sleep or asyncio.sleep)(seconds() if callable(seconds) else seconds)

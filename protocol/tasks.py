"""The end of asyncio tasks that run together."""

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any


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

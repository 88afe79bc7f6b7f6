"""The worker threads of a daemon run one function at a time, with different priorities."""

import asyncio
import os
import threading
from typing import Any

import pytest

from node.processes.process import LOW_PRIORITY_NICENESS, TRAINER_NICENESS
from node.processes.workers import Workers, start_workers


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


async def test_low_priority_thread_comes_after_the_trainer_and_compute_before() -> None:
    own = niceness()
    with start_workers() as workers:
        assert await workers.compute(niceness) == own
        assert await workers.low_priority(niceness) == own + LOW_PRIORITY_NICENESS > own + TRAINER_NICENESS
    assert niceness() == own, "only the worker thread changes"


@pytest.mark.parametrize("kind", ["compute", "low_priority"])
async def test_functions_run_in_order_and_errors_are_returned(kind: str) -> None:
    done: list[int] = []

    def divide(number: int) -> float:
        done.append(number)
        return 1 / number

    with start_workers() as workers:
        work = getattr(workers, kind)
        results: list[Any] = await asyncio.gather(*(work(divide, by) for by in (2, 0, 4)), return_exceptions=True)
    assert (results[0], results[2], done) == (0.5, 0.25, [2, 0, 4])
    assert isinstance(results[1], ZeroDivisionError)


async def test_compute_does_not_wait_for_low_priority_work() -> None:
    """With one thread for both, the second call would never start."""
    may_continue = threading.Event()

    async def run_both(workers: Workers) -> None:
        was_set, _ = await asyncio.gather(workers.low_priority(may_continue.wait), workers.compute(may_continue.set))
        assert was_set

    with start_workers() as workers:
        async with asyncio.timeout(20):
            await run_both(workers)

"""The threads of a daemon: one thing after the other, and who goes first."""

import asyncio
import os
import threading
from typing import Any

import pytest

from node.process import LOW_PRIORITY_NICENESS, TRAINER_NICENESS
from node.workers import Workers, start_workers


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


async def test_what_nobody_waits_for_comes_behind_the_trainer_and_the_rest_before_it() -> None:
    own = niceness()
    with start_workers() as at_work:
        assert await at_work.compute(niceness) == own
        assert await at_work.low_priority(niceness) == own + LOW_PRIORITY_NICENESS > own + TRAINER_NICENESS
    assert niceness() == own, "of its thread alone"


@pytest.mark.parametrize("kind", ["compute", "low_priority"])
async def test_one_thing_comes_after_the_other_and_faults_come_back(kind: str) -> None:
    done: list[int] = []

    def divide(number: int) -> float:
        done.append(number)
        return 1 / number

    with start_workers() as at_work:
        work = getattr(at_work, kind)
        found: list[Any] = await asyncio.gather(*(work(divide, by) for by in (2, 0, 4)), return_exceptions=True)
    assert (found[0], found[2], done) == (0.5, 0.25, [2, 0, 4])
    assert isinstance(found[1], ZeroDivisionError)


async def test_no_round_waits_for_what_nobody_waits_for() -> None:
    """With one thread for both, the second would come when the first is done."""
    goes_on = threading.Event()

    async def together(at_work: Workers) -> None:
        came, _ = await asyncio.gather(at_work.low_priority(goes_on.wait), at_work.compute(goes_on.set))
        assert came

    with start_workers() as at_work:
        async with asyncio.timeout(20):
            await together(at_work)

import asyncio

import pytest

from protocol.tasks import cancel_and_wait, run_periodically


async def test_all_tasks_have_ended_including_failing_and_slow_ones() -> None:
    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)

    async def broken() -> None:
        raise ValueError

    tasks = [asyncio.create_task(stubborn()), asyncio.create_task(broken())]
    await asyncio.sleep(0)
    await cancel_and_wait(tasks)
    assert all(task.done() for task in tasks)
    assert tasks[0].cancelled() and isinstance(tasks[1].exception(), ValueError)
    await cancel_and_wait([])


async def test_periodic_work_runs_at_once_and_after_each_pause_until_it_raises() -> None:
    events: list[str] = []

    async def sleep(seconds: float) -> None:
        events.append(f"pause of {seconds}")

    async def work() -> None:
        events.append("work")
        if len(events) == 5:
            raise ValueError("broken")

    pauses = iter((1.0, 2.0))
    with pytest.raises(ValueError, match="broken"):
        await run_periodically(lambda: next(pauses), work, sleep=sleep)
    assert events == ["work", "pause of 1.0", "work", "pause of 2.0", "work"]


async def test_periodic_work_may_be_a_plain_function() -> None:
    events: list[str] = []
    task = asyncio.create_task(run_periodically(60, lambda: events.append("work")))
    await asyncio.sleep(0)
    await cancel_and_wait([task])
    assert events == ["work"] and task.cancelled()

import asyncio

from protocol.tasks import cancel_and_wait


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

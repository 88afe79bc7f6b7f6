import asyncio

import pytest

from node.processes.workers import BackgroundTasks
from tests.node.daemon.recorded_errors import RecordedFaults


async def fail() -> None:
    raise KeyError("a bug")


async def test_failed_task_is_reported_and_finished_tasks_are_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    faults = RecordedFaults()
    background = BackgroundTasks(faults)
    background.spawn(asyncio.sleep(0))
    background.spawn(fail())
    assert len(background) == 2
    while background:
        await asyncio.sleep(0)
    assert [type(fault) for fault in faults.faults] == [KeyError]
    assert "a bug" in caplog.text


async def test_cancelled_task_is_not_a_fault() -> None:
    faults = RecordedFaults()
    background, begun, undone = BackgroundTasks(faults), asyncio.Event(), asyncio.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            undone.set()

    background.spawn(endless())
    await begun.wait()
    background.cancel_all()
    await undone.wait()
    assert not background and not faults.faults

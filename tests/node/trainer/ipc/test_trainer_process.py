"""The daemon restarts a trainer that dies, gives up on one that keeps dying, and leaves nothing behind."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from node.trainer.ipc import trainer_process
from node.trainer.ipc.channel import ApplyAnchor, FromTrainer, Ready, Stopped, TrainerProgress
from node.trainer.ipc.trainer_process import MAX_CRASHES_IN_A_ROW, TrainerProcess, TrainerRun
from protocol.errors import DataError, DeviceError, MurmurError, error_with_code
from tests.node.trainer.process_harness import ProcessHarness

pytestmark = pytest.mark.slow


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[ProcessHarness]:
    harness = ProcessHarness(tmp_path, inner_steps=1000)
    yield harness
    await harness.close()


@pytest.fixture
def fake_trainer(harness: ProcessHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a program that runs in place of the trainer, with the channel's descriptor in argv[4]."""
    program = tmp_path / "program.py"
    launcher = tmp_path / "python"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))
    monkeypatch.setattr(trainer_process, "MIN_RESTART_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(trainer_process, "MAX_RESTART_DELAY_SECONDS", 0.05)
    return program


SEND = """
import json, os, socket, sys, time
channel = socket.socket(fileno=int(sys.argv[4]))
def send(**message):
    body = json.dumps(message).encode()
    channel.sendall(len(body).to_bytes(4, "big") + body)
"""
READY = 'send(kind="ready", device="cpu", step=0, round=0, outstanding=None)\n'
PROGRESS = 'send(kind="progress", step=1, tokens=1, loss=1.0, tokens_per_second=1.0, seconds={})\n'


async def read_all(trainer: TrainerProcess) -> list[FromTrainer]:
    async with asyncio.timeout(30):
        return [message async for message in trainer.messages()]


async def test_daemon_gives_up_on_a_trainer_that_keeps_dying(
    harness: ProcessHarness, fake_trainer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fake_trainer.write_text("import sys; sys.stderr.write('first\\nout of memory\\n'); sys.exit(3)")
    await harness.trainer.start()
    line = r"died 5 times in a row \(exit code 3\), last line: out of memory; .* try --device cpu"
    with pytest.raises(DeviceError, match=line) as caught:
        await read_all(harness.trainer)
    assert "\n" not in str(caught.value)
    assert harness.trainer.crash_count == MAX_CRASHES_IN_A_ROW and harness.trainer.pid is None
    assert sum("the trainer died (exit code 3)" in line for line in caplog.messages) == MAX_CRASHES_IN_A_ROW
    assert caplog.messages.count("trainer: first") == MAX_CRASHES_IN_A_ROW


async def test_trainer_that_makes_progress_is_restarted_without_limit(
    harness: ProcessHarness, fake_trainer: Path
) -> None:
    fake_trainer.write_text(SEND + PROGRESS + "sys.exit(1)")
    await harness.trainer.start()
    async with asyncio.timeout(30):
        async for _ in harness.trainer.messages():
            if harness.trainer.crash_count > 2 * MAX_CRASHES_IN_A_ROW:
                break


async def test_failed_message_is_raised_as_its_error(harness: ProcessHarness, fake_trainer: Path) -> None:
    fake_trainer.write_text(SEND + 'send(kind="failed", reason="no text; give some", exit_code=12)')
    await harness.trainer.start()
    with pytest.raises(DataError, match="no text; give some"):
        await read_all(harness.trainer)
    assert harness.trainer.pid is None


CRASH = 'send(kind="crashed", reason="{}", exit_code={})\n'


@pytest.mark.parametrize(
    "end",
    [
        CRASH.format("IndexError: 7 (text.py, line 3)", 1) + "sys.exit(1)",
        "sys.stderr.write('Traceback\\nIndexError: 7 (text.py, line 3)\\n'); sys.exit(1)",
    ],
)
async def test_trainer_that_crashes_with_one_error_before_a_step_is_named_at_the_second_time(
    harness: ProcessHarness,
    fake_trainer: Path,
    caplog: pytest.LogCaptureFixture,
    end: str,
) -> None:
    fake_trainer.write_text(SEND + READY + end)
    await harness.trainer.start()
    with pytest.raises(MurmurError, match=r"crashes each time: IndexError: 7 \(text.py, line 3\); report") as caught:
        await read_all(harness.trainer)
    assert caught.value.exit_code == 1 and harness.trainer.crash_count == 2
    assert sum("death" in line for line in caplog.messages) == 1, "only the first death is logged"


async def test_ranks_that_ran_out_of_memory_start_again_with_smaller_microbatches(
    harness: ProcessHarness, fake_trainer: Path
) -> None:
    """Several ranks may report it, and that counts once. Control: another crash changes nothing."""
    fake_trainer.write_text(
        f"""{SEND}
length = int.from_bytes(channel.recv(4), "big")
halvings = json.loads(channel.recv(length))["halvings"]
send(kind="ready", device="cpu", step=halvings, round=0, outstanding=None)
for _ in range(2):
    send(kind="crashed", reason="full", exit_code=11, halve=halvings < 2)
"""
    )
    await harness.trainer.start()
    with pytest.raises(DeviceError, match="died 5 times in a row"):
        async with asyncio.timeout(30):
            async for message in harness.trainer.messages():
                harness.seen.append(message)
    assert [message.step for message in harness.seen if isinstance(message, Ready)] == [0, 1, 2, 2, 2]


async def test_trainer_that_crashes_with_other_errors_by_its_device_or_after_a_step_is_restarted(
    harness: ProcessHarness, fake_trainer: Path
) -> None:
    """The negative control of giving up early."""
    reason = "str(time.time())"
    fake_trainer.write_text(SEND + READY + f'send(kind="crashed", reason={reason}, exit_code=1)\nsys.exit(1)')
    await harness.trainer.start()
    with pytest.raises(DeviceError, match="died 5 times in a row"):
        await read_all(harness.trainer)
    fake_trainer.write_text(SEND + READY + CRASH.format("CUDA error", 11) + "sys.exit(1)")
    of_device = TrainerProcess(harness.arena, harness.config())
    await of_device.start()
    with pytest.raises(DeviceError, match="died 5 times in a row .* last line: CUDA error; .* try --device cpu"):
        await read_all(of_device)
    fake_trainer.write_text(SEND + PROGRESS + CRASH.format("IndexError: 7", 1) + "sys.exit(1)")
    again = TrainerProcess(harness.arena, harness.config())
    await again.start()
    async with asyncio.timeout(30):
        async for _ in again.messages():
            if again.crash_count > MAX_CRASHES_IN_A_ROW:
                break
    await again.stop()


@pytest.mark.parametrize("code", range(14))
def test_exit_codes_become_errors(code: int) -> None:
    error = error_with_code(code, "why")
    assert str(error) == "why" and error.exit_code == (code or 1)


@pytest.mark.parametrize("value", [None, "7"])
async def test_spin_count_of_the_trainer_is_low_unless_set_by_the_user(
    harness: ProcessHarness, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if value is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", value)
    await harness.trainer.start()
    assert harness.trainer.pid is not None
    assert psutil.Process(harness.trainer.pid).environ()["GOMP_SPINCOUNT"] == (value or "1000")


async def test_trainer_that_sends_a_malformed_message_is_killed(harness: ProcessHarness, fake_trainer: Path) -> None:
    fake_trainer.write_text(SEND + 'send(kind="nonsense"); time.sleep(600)')
    await harness.trainer.start()
    with pytest.raises(DeviceError, match="signal 9"):
        await read_all(harness.trainer)


@pytest.mark.parametrize("is_watched", [True, False])
async def test_stuck_trainer_is_restarted(
    harness: ProcessHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_watched: bool
) -> None:
    monkeypatch.setattr(trainer_process, "WATCHDOG_SECONDS", 0.05)
    monkeypatch.setattr(trainer_process, "MIN_STUCK_SECONDS", 5.0 if is_watched else 600.0)
    await harness.trainer.start()
    await harness.until(Ready)
    await harness.until(TrainerProgress)
    stuck = harness.trainer.pid
    assert stuck is not None
    os.kill(stuck, signal.SIGSTOP)  # like a hanging driver: the process lives but is silent
    if is_watched:
        await harness.until(Ready)
        assert harness.trainer.pid != stuck and (await harness.until(TrainerProgress)).step > 0
        assert any("the trainer died (it was stuck), death 1" in line for line in caplog.messages)
    else:  # control: without the watchdog
        with pytest.raises(TimeoutError):
            await harness.until(Ready, deadline=8.0)
        assert harness.trainer.pid == stuck
        os.kill(stuck, signal.SIGCONT)


async def test_long_stderr_lines_are_cut(
    harness: ProcessHarness, fake_trainer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fake_trainer.write_text("import sys; sys.stderr.write('x' * 3_000_000); sys.exit(1)")
    await harness.trainer.start()
    with pytest.raises(DeviceError):
        await read_all(harness.trainer)
    assert max(len(line) for line in caplog.messages) < 2 * trainer_process.MAX_STDERR_LINE_BYTES + 200


async def test_trainer_that_does_not_stop_is_killed(
    harness: ProcessHarness, fake_trainer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake_trainer.write_text(SEND + READY + "time.sleep(600)")
    await harness.trainer.start()
    pid = harness.trainer.pid
    assert pid is not None and psutil.pid_exists(pid)
    await harness.until(Ready)
    await harness.trainer.stop(0.2)
    assert not psutil.pid_exists(pid) and harness.trainer.pid is None
    assert "did not stop" in caplog.text


async def test_stop_kills_a_trainer_that_is_still_starting(
    harness: ProcessHarness, fake_trainer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake_trainer.write_text("import time; time.sleep(600)")
    await harness.trainer.start()
    await asyncio.wait_for(harness.trainer.stop(600), 60)
    assert harness.trainer.pid is None and "did not stop" not in caplog.text


async def test_trainer_that_sends_without_end_is_stopped(harness: ProcessHarness, fake_trainer: Path) -> None:
    fake_trainer.write_text(SEND + READY + "while True:\n    " + PROGRESS)
    await harness.trainer.start()
    await harness.until(Ready)
    await harness.trainer.stop(0.5)
    assert harness.trainer.pid is None


async def test_stop_during_the_restart_delay_spawns_no_trainer(
    harness: ProcessHarness, fake_trainer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_process, "MIN_RESTART_DELAY_SECONDS", 0.5)
    monkeypatch.setattr(trainer_process, "MAX_RESTART_DELAY_SECONDS", 0.5)
    fake_trainer.write_text("import sys; sys.exit(1)")
    await harness.trainer.start()
    while harness.trainer.crash_count == 0:
        await asyncio.sleep(0.005)
    assert not await harness.trainer.send(ApplyAnchor(round=1, outcome="none"))
    await harness.trainer.stop()
    assert harness.trainer.crash_count == 1 and harness.trainer.pid is None
    assert harness.trainer.not_running_reason == "the trainer died (exit code 1) and is restarting"


async def test_stop_during_a_spawn_does_not_wait_for_ready(
    harness: ProcessHarness, fake_trainer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_trainer.write_text(SEND + READY + "time.sleep(600)")
    await harness.trainer.start()
    await harness.until(Ready)
    spawn, spawned, may_continue = harness.trainer._spawn, list[int](), asyncio.Event()

    async def spawn_slowly() -> TrainerRun:
        run = await spawn()
        assert run.pid is not None
        spawned.append(run.pid)
        await may_continue.wait()
        return run

    monkeypatch.setattr(harness.trainer, "_spawn", spawn_slowly)
    assert harness.trainer.pid is not None
    os.kill(harness.trainer.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        while not spawned:
            await asyncio.sleep(0.01)
    stopping = asyncio.create_task(harness.trainer.stop())
    await asyncio.sleep(0)
    may_continue.set()
    await asyncio.wait_for(stopping, trainer_process.STOP_SECONDS / 2)
    assert not psutil.pid_exists(spawned[0]) and harness.trainer.pid is None


async def test_stop_writes_a_snapshot_and_may_be_repeated(harness: ProcessHarness) -> None:
    await harness.trainer.start()
    await harness.until(Ready)
    pid = harness.trainer.pid
    assert pid is not None
    consumer = asyncio.create_task(read_all(harness.trainer))
    await harness.trainer.stop()
    assert not psutil.pid_exists(pid)
    assert all(not isinstance(message, Ready) for message in await consumer)
    snapshot = harness.arena.read_snapshot()
    assert snapshot is not None and snapshot.meta["step"] >= 0
    await harness.trainer.stop()


async def test_trainer_killed_before_its_config_starts_from_the_anchor(harness: ProcessHarness) -> None:
    """Without a snapshot, the next one starts from the anchor."""
    await harness.trainer.start()
    pid = harness.trainer.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert harness.trainer.not_running_reason == "the trainer is starting"
    ready = await harness.until(Ready)
    assert ready.step == 0 and harness.trainer.crash_count == 1 and harness.trainer.not_running_reason == ""


async def test_spawn_failure_raises_one_line(harness: ProcessHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    await harness.trainer.start()
    await harness.until(Ready)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert harness.trainer.pid is not None
    os.kill(harness.trainer.pid, signal.SIGKILL)
    with pytest.raises(MurmurError, match="cannot start the trainer"):
        await harness.until(Stopped)


async def test_ten_trainers_in_a_row_leave_no_process_or_descriptor(
    harness: ProcessHarness, fake_trainer: Path
) -> None:
    fake_trainer.write_text(SEND + "while (data := channel.recv(1 << 20)) and b'stop' not in data: pass")
    before, files = psutil.Process().children(), psutil.Process().num_fds()
    for _ in range(10):
        trainer = TrainerProcess(harness.arena, harness.config())
        await trainer.start()
        await trainer.stop()
    assert psutil.Process().children() == before
    assert psutil.Process().num_fds() <= files + 2

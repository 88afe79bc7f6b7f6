"""The daemon's side: deaths are noticed, told and healed; who keeps dying is given up; nothing is left behind."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from node.ipc import trainer_process
from node.ipc.channel import ApplyAnchor, Failed, FromTrainer, Ready, Stopped, TrainerProgress
from node.ipc.trainer_process import MAX_CRASHES_IN_A_ROW, TrainerProcess
from protocol.errors import DataError, DeviceError, MurmurError
from tests.node.trainer.process_harness import ProcessHarness


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[ProcessHarness]:
    made = ProcessHarness(tmp_path, inner_steps=1000)
    yield made
    await made.close()


@pytest.fixture
def scripted(bench: ProcessHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program to be run in the trainer's place; it finds the channel's descriptor in argv[3]."""
    program = tmp_path / "program.py"
    launcher = tmp_path / "python"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))
    monkeypatch.setattr(trainer_process, "MIN_RESTART_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(trainer_process, "MAX_RESTART_DELAY_SECONDS", 0.05)
    return program


SAY = """
import json, os, socket, sys, time
channel = socket.socket(fileno=int(sys.argv[3]))
def say(**message):
    body = json.dumps(message).encode()
    channel.sendall(len(body).to_bytes(4, "big") + body)
"""
READY = 'say(kind="ready", device="cpu", step=0, round=0, outstanding=None)\n'
PROGRESS = 'say(kind="progress", step=1, tokens=1, loss=1.0, tokens_per_second=1.0, seconds={})\n'


async def everything(trainer: TrainerProcess) -> list[FromTrainer]:
    async with asyncio.timeout(30):
        return [message async for message in trainer.messages()]


async def test_who_keeps_dying_is_given_up_with_its_last_words(
    bench: ProcessHarness, scripted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    scripted.write_text("import sys; sys.stderr.write('first\\nout of memory\\n'); sys.exit(3)")
    await bench.trainer.start()
    line = r"died 5 times in a row \(exit code 3\), last: out of memory; .* try --device cpu"
    with pytest.raises(DeviceError, match=line) as caught:
        await everything(bench.trainer)
    assert "\n" not in str(caught.value)
    assert bench.trainer.crash_count == MAX_CRASHES_IN_A_ROW and bench.trainer.pid is None
    assert sum("the trainer died (exit code 3)" in line for line in caplog.messages) == MAX_CRASHES_IN_A_ROW
    assert caplog.messages.count("trainer: first") == MAX_CRASHES_IN_A_ROW


async def test_deaths_with_progress_between_are_healed(bench: ProcessHarness, scripted: Path) -> None:
    scripted.write_text(SAY + PROGRESS + "sys.exit(1)")
    await bench.trainer.start()
    async with asyncio.timeout(30):
        async for _ in bench.trainer.messages():
            if bench.trainer.crash_count > 2 * MAX_CRASHES_IN_A_ROW:
                break


async def test_failed_is_raised_as_the_error_it_was(bench: ProcessHarness, scripted: Path) -> None:
    scripted.write_text(SAY + 'say(kind="failed", reason="no text; give some", exit_code=12)')
    await bench.trainer.start()
    with pytest.raises(DataError, match="no text; give some"):
        await everything(bench.trainer)
    assert bench.trainer.pid is None


@pytest.mark.parametrize("code", range(14))
def test_exit_codes_become_errors(code: int) -> None:
    error = trainer_process._error_from(Failed(reason="why", exit_code=code))
    assert str(error) == "why" and error.exit_code == (code or 1)


@pytest.mark.parametrize("said", [None, "7"])
async def test_its_threads_wait_without_spinning_for_long_unless_somebody_says_so(
    bench: ProcessHarness, monkeypatch: pytest.MonkeyPatch, said: str | None
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if said is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", said)
    await bench.trainer.start()
    assert bench.trainer.pid is not None
    assert psutil.Process(bench.trainer.pid).environ()["GOMP_SPINCOUNT"] == (said or "1000")


async def test_garbage_on_the_channel_is_a_death(bench: ProcessHarness, scripted: Path) -> None:
    scripted.write_text(SAY + 'say(kind="nonsense"); time.sleep(600)')
    await bench.trainer.start()
    with pytest.raises(DeviceError, match="signal 9"):
        await everything(bench.trainer)


@pytest.mark.parametrize("watched", [True, False])
async def test_a_trainer_that_no_longer_moves_is_started_again(
    bench: ProcessHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, watched: bool
) -> None:
    monkeypatch.setattr(trainer_process, "WATCHDOG_SECONDS", 0.05)
    monkeypatch.setattr(trainer_process, "MIN_STUCK_SECONDS", 5.0 if watched else 600.0)
    await bench.trainer.start()
    await bench.until(Ready)
    await bench.until(TrainerProgress)
    stuck = bench.trainer.pid
    assert stuck is not None
    os.kill(stuck, signal.SIGSTOP)  # as a driver that hangs: the process lives, and says nothing
    if watched:
        await bench.until(Ready)
        assert bench.trainer.pid != stuck and (await bench.until(TrainerProgress)).step > 0
        assert any("the trainer died (it no longer moved), death 1" in line for line in caplog.messages)
    else:  # control: nobody else notices
        with pytest.raises(TimeoutError):
            await bench.until(Ready, deadline=8.0)
        assert bench.trainer.pid == stuck
        os.kill(stuck, signal.SIGCONT)


async def test_a_flood_of_words_is_bounded(
    bench: ProcessHarness, scripted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    scripted.write_text("import sys; sys.stderr.write('x' * 3_000_000); sys.exit(1)")
    await bench.trainer.start()
    with pytest.raises(DeviceError):
        await everything(bench.trainer)
    assert max(len(line) for line in caplog.messages) < 2 * trainer_process.MAX_STDERR_LINE_BYTES + 200


async def test_one_that_does_not_stop_is_killed(
    bench: ProcessHarness, scripted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.write_text(SAY + READY + "time.sleep(600)")
    await bench.trainer.start()
    pid = bench.trainer.pid
    assert pid is not None and psutil.pid_exists(pid)
    await bench.until(Ready)
    await bench.trainer.stop(0.2)
    assert not psutil.pid_exists(pid) and bench.trainer.pid is None
    assert "did not stop" in caplog.text


async def test_one_that_is_not_at_work_yet_is_not_waited_for(
    bench: ProcessHarness, scripted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.write_text("import time; time.sleep(600)")
    await bench.trainer.start()
    await asyncio.wait_for(bench.trainer.stop(600), 60)
    assert bench.trainer.pid is None and "did not stop" not in caplog.text


async def test_one_that_never_ceases_to_talk_is_stopped_too(bench: ProcessHarness, scripted: Path) -> None:
    scripted.write_text(SAY + READY + "while True:\n    " + PROGRESS)
    await bench.trainer.start()
    await bench.until(Ready)
    await bench.trainer.stop(0.5)
    assert bench.trainer.pid is None


async def test_stop_during_the_pause_after_a_death_starts_no_other(
    bench: ProcessHarness, scripted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_process, "MIN_RESTART_DELAY_SECONDS", 0.5)
    monkeypatch.setattr(trainer_process, "MAX_RESTART_DELAY_SECONDS", 0.5)
    scripted.write_text("import sys; sys.exit(1)")
    await bench.trainer.start()
    while bench.trainer.crash_count == 0:
        await asyncio.sleep(0.005)
    assert not await bench.trainer.send(ApplyAnchor(round=1, outcome="none"))
    await bench.trainer.stop()
    assert bench.trainer.crash_count == 1 and bench.trainer.pid is None
    assert bench.trainer.not_running_reason == "the trainer died (exit code 1) and is started again"


async def test_stop_while_another_is_spawned_does_not_wait_for_it(
    bench: ProcessHarness, scripted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.write_text(SAY + READY + "time.sleep(600)")
    await bench.trainer.start()
    await bench.until(Ready)
    spawn, spawned, goes_on = bench.trainer._spawn, list[int](), asyncio.Event()

    async def slowly() -> trainer_process._Run:
        life = await spawn()
        spawned.append(life.process.pid)
        await goes_on.wait()
        return life

    monkeypatch.setattr(bench.trainer, "_spawn", slowly)
    assert bench.trainer.pid is not None
    os.kill(bench.trainer.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        while not spawned:
            await asyncio.sleep(0.01)
    stopping = asyncio.create_task(bench.trainer.stop())
    await asyncio.sleep(0)
    goes_on.set()
    await asyncio.wait_for(stopping, trainer_process.STOP_SECONDS / 2)
    assert not psutil.pid_exists(spawned[0]) and bench.trainer.pid is None


async def test_stopping_politely_and_again(bench: ProcessHarness) -> None:
    await bench.trainer.start()
    await bench.until(Ready)
    pid = bench.trainer.pid
    assert pid is not None
    consumer = asyncio.create_task(everything(bench.trainer))
    await bench.trainer.stop()
    assert not psutil.pid_exists(pid)
    assert all(not isinstance(message, Ready) for message in await consumer)
    snapshot = bench.arena.read_snapshot()
    assert snapshot is not None and snapshot.meta["step"] >= 0
    await bench.trainer.stop()


async def test_killed_in_its_first_instant(bench: ProcessHarness) -> None:
    """Before it has even read its config: no snapshot yet, so it starts from the anchor."""
    await bench.trainer.start()
    pid = bench.trainer.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert bench.trainer.not_running_reason == "the trainer is starting"
    ready = await bench.until(Ready)
    assert ready.step == 0 and bench.trainer.crash_count == 1 and bench.trainer.not_running_reason == ""


async def test_a_program_that_cannot_be_started_is_one_line(
    bench: ProcessHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.trainer.start()
    await bench.until(Ready)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert bench.trainer.pid is not None
    os.kill(bench.trainer.pid, signal.SIGKILL)
    with pytest.raises(MurmurError, match="cannot be started"):
        await bench.until(Stopped)


async def test_ten_in_a_row_leave_nothing(bench: ProcessHarness, scripted: Path) -> None:
    scripted.write_text(SAY + "while (data := channel.recv(1 << 20)) and b'stop' not in data: pass")
    before, files = psutil.Process().children(), psutil.Process().num_fds()
    for _ in range(10):
        trainer = TrainerProcess(bench.arena, bench.config())
        await trainer.start()
        await trainer.stop()
    assert psutil.Process().children() == before
    assert psutil.Process().num_fds() <= files + 2

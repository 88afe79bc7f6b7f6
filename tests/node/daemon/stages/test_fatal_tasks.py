"""A task of which the trainer dies: a real trainer process dies twice of it, and then no more."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from node.trainer.ipc import trainer_process
from node.trainer.ipc.trainer_process import MAX_CRASHES_IN_A_ROW, TrainerProcess
from protocol.errors import DeviceError
from protocol.pipeline import microbatch_table
from protocol.pipeline.microbatch_table import FatalTasks
from protocol.pipeline.owner import Owner
from tests.node.daemon.stages.attacked_stage import HOLDER, ME, OWNER, STRANGER, AttackedStage
from tests.node.trainer.process_harness import ProcessHarness

MANY = 2 * MAX_CRASHES_IN_A_ROW
SECONDS = 60
# Computes nothing, and dies in native code of an activation that begins with `MARK`.
MARK = b"fatal"
PROGRAM = f"""
import json, mmap, os, signal, socket, sys
channel, memory = socket.socket(fileno=int(sys.argv[4])), mmap.mmap(int(sys.argv[-1]), 0)
def send(**message):
    body = json.dumps(message).encode()
    channel.sendall(len(body).to_bytes(4, "big") + body)
def receive():
    size = int.from_bytes(channel.recv(4, socket.MSG_WAITALL), "big")
    return json.loads(channel.recv(size, socket.MSG_WAITALL))
start = receive()["start"]
send(kind="ready", device="cpu", step=0, round=0, outstanding=None, start=start)
while True:
    command = receive()
    if command["kind"] == "compute stage" and command["start"] == start:
        place = command["activation"] * SLOT
        if memory[place : place + {len(MARK)}] == {MARK!r}:
            os.kill(os.getpid(), signal.SIGSEGV)
        send(kind="stage computed", task=command["task"], seconds=0.01)
    if command["kind"] == "stage step":
        send(kind="stage stepped")
    if command["kind"] == "stop":
        break
"""


class DyingTrainer:
    """An attacked stage with a real trainer process."""

    def __init__(self, folder: Path) -> None:
        (folder / "blobs").mkdir()
        self.stage = AttackedStage(folder / "blobs")
        self.harness = ProcessHarness(folder)
        config = self.harness.config().model_copy(update={"peer_id": ME})
        self.process = TrainerProcess(self.harness.arena, config, self.stage.memory)
        self.ended: Exception | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.process.start()
        self._tasks = [asyncio.create_task(self._listen())]
        self.stage.stage._background.spawn(self.stage.stage._send_commands(self.process.send))

    async def _listen(self) -> None:
        try:
            async for message in self.process.messages():
                self.stage.stage.on_trainer_message(message)
        except DeviceError as error:
            self.ended = error

    async def stop(self) -> None:
        self.stage.stage._background.cancel_all()
        await self.process.stop(5.0)
        await asyncio.wait(self._tasks, timeout=5)

    def fatal_task(self, serial: int, attempt: int, owner: str) -> object:
        content = MARK.ljust(self.stage.sizes.activation_bytes, b".")
        task = self.stage.task(serial, "forward", self.stage.shelf.put(content), owner=owner)
        return replace(task, attempt=attempt)

    async def attack(self, other_keys: bool, owner: str = STRANGER) -> None:
        """Ask for the fatal computation, again and again, until it is answered or the trainer has died often."""
        async with asyncio.timeout(SECONDS):
            for attempt in range(1, 50):
                first = self.stage.loop._first_serial if owner == ME else 0
                task = self.fatal_task(first + (attempt if other_keys else 1), attempt, owner)
                answer = self.stage.node.answer(task)  # type: ignore[arg-type]
                if answer.kind in ("busy", "known") or self.ended or self.process.crash_count >= MANY:
                    return
                deaths = self.process.crash_count
                while self.process.crash_count == deaths and self.ended is None:
                    await asyncio.sleep(0.01)
                while self.process.not_running_reason and self.ended is None:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.05)

    async def serves(self) -> bool:
        """Return whether an honest owner's microbatch is computed."""
        self.stage.node.answer(self.stage.task(77, "forward", self.stage.activation(1), owner=OWNER))
        for _ in range(300):
            await asyncio.sleep(0.02)
            if self.stage.statuses(OWNER) == ["done"]:
                return True
        return False


@pytest.fixture
async def dying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DyingTrainer]:
    made = DyingTrainer(tmp_path)
    slot, _ = made.stage.sizes.place(1)
    program, launcher = tmp_path / "program.py", tmp_path / "python"
    program.write_text(PROGRAM.replace("SLOT", str(slot)))
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))
    monkeypatch.setattr(trainer_process, "MIN_RESTART_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(trainer_process, "MAX_RESTART_DELAY_SECONDS", 0.02)
    await made.start()
    yield made
    await made.stop()


@pytest.mark.parametrize("other_keys", [False, True], ids=["one microbatch", "ever new ones"])
async def test_task_that_kills_the_trainer_is_computed_twice(dying: DyingTrainer, other_keys: bool) -> None:
    await dying.attack(other_keys)
    assert dying.process.crash_count == 2 and dying.ended is None
    assert dying.stage.statuses(STRANGER) == ["void", "invalid"]
    assert {peer for peer, _ in dying.stage.directory.refused} == {STRANGER}
    assert await dying.serves()


@pytest.mark.parametrize("is_old", [False, True], ids=["rule", "control"])
async def test_peer_whose_results_kill_our_trainer_gets_no_microbatches(
    dying: DyingTrainer, is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_old:
        monkeypatch.setattr(Owner, "distrust", lambda self, peer, now: None)
    await dying.attack(other_keys=False, owner=ME)
    owner, now = dying.stage.loop.owner, asyncio.get_running_loop().time()
    assert dying.process.crash_count == 2
    assert {peer for peer, _ in dying.stage.directory.refused} == {HOLDER}
    assert all((router._loss_until(HOLDER) > now) != is_old for router in owner._routers)


async def test_old_rule_repeats_it_without_end(dying: DyingTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: as often as the test lets it."""
    monkeypatch.setattr(FatalTasks, "record", lambda *_: False)
    monkeypatch.setattr(FatalTasks, "record_task", lambda *_: False)
    await dying.attack(other_keys=False)
    assert dying.process.crash_count >= MANY and dying.stage.statuses(STRANGER) == ["void"] * MANY


async def test_old_count_of_deaths_ends_the_node(dying: DyingTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a stranger's task looks like a broken machine."""
    monkeypatch.setattr(FatalTasks, "record", lambda *_: False)
    monkeypatch.setattr(FatalTasks, "record_task", lambda *_: False)
    monkeypatch.setattr(trainer_process, "MAX_SERVED_CRASHES", MAX_CRASHES_IN_A_ROW)
    await dying.attack(other_keys=True)
    async with asyncio.timeout(SECONDS):
        while dying.ended is None:
            await asyncio.sleep(0.01)
    assert "died 5 times in a row" in str(dying.ended)


def test_pause_of_a_maker_doubles_and_good_tasks_are_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    fatal, now = FatalTasks(), 0.0
    assert not fatal.record("a", now) and fatal.pause("a", now) == 0.0, "it may be chance"
    pauses = []
    for _ in range(3):
        assert fatal.record("a", now)
        pauses.append(fatal.pause("a", now))
        now += pauses[-1]
    assert pauses == [60.0, 120.0, 240.0] and fatal.pause("b", now) == 0.0
    for _ in range(4 * microbatch_table.FORGIVEN_AFTER):
        fatal.record_computed("a")
    assert not fatal.record("a", now)

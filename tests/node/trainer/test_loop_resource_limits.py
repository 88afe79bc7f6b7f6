"""The trainer under `--threads`, `--memory` and `--pause-when-busy`."""

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest
import torch

from node.model import LanguageModel
from node.model.memory_estimate import fit_microbatch, fixed_bytes, microbatch_bytes
from node.trainer import loop
from node.trainer.devices import pause_when_busy
from node.trainer.inner_step import accumulate_gradient
from node.trainer.ipc.channel import (
    AnchorApplied,
    ApplyAnchor,
    ContributionHeader,
    DaemonChannel,
    FromTrainer,
    PauseChanged,
    Ready,
    Stop,
    TrainerChannel,
    TrainerProgress,
)
from node.trainer.loop import Trainer
from protocol.errors import DeviceError
from tests.node.trainer.process_harness import DEADLINE, M, ProcessHarness

pytestmark = pytest.mark.slow


class ScriptedMeter:
    """In the place of a meter: the test says how much others use."""

    description, pause_share, resume_share, used = "of the processors", 0.25, 0.15, 0.0

    def measure_share(self) -> float:
        return self.used


class InProcess:
    """A trainer in a thread of ours, so that a test can put something in its way."""

    def __init__(self, bench: ProcessHarness, ours: DaemonChannel, trainer: Trainer) -> None:
        self.bench = bench
        self.channel = ours
        self.trainer = trainer
        self.running = asyncio.create_task(asyncio.to_thread(trainer.run))

    async def until(self, kind: type[M], where: Callable[[M], bool] = lambda message: True) -> M:
        async with asyncio.timeout(DEADLINE):
            while True:
                message: FromTrainer = await self.channel.receive()
                if isinstance(message, kind) and where(message):
                    return message

    async def stop(self) -> None:
        await self.channel.send(Stop())
        await asyncio.wait_for(self.running, DEADLINE)


Start = Callable[..., Awaitable[InProcess]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    made: list[InProcess] = []

    async def started(**options: object) -> InProcess:
        bench = ProcessHarness(tmp_path, **options)  # type: ignore[arg-type]
        ours, theirs = socket.socketpair()
        end = TrainerChannel(theirs)
        trainer = Trainer(bench.config(), bench.manifest, bench.program, bench.arena, end)
        made.append(InProcess(bench, await DaemonChannel.open(ours), trainer))
        return made[-1]

    yield started
    for one in made:
        if not one.running.done():
            await one.stop()
        await one.channel.close()
        one.trainer._channel.close()
        del one.trainer
        one.bench.arena.close()


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> ScriptedMeter:
    scripted = ScriptedMeter()
    monkeypatch.setattr(loop, "usage_meter_for", lambda device: scripted)
    monkeypatch.setattr(pause_when_busy, "USAGE_SECONDS", 0.0)
    monkeypatch.setattr(pause_when_busy, "PAUSE_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(pause_when_busy, "RESUME_AFTER_SECONDS", 0.0)
    return scripted


async def test_it_stands_back_between_steps_and_goes_on(start: Start, meter: ScriptedMeter) -> None:
    one = await start(inner_steps=1000, pause_when_busy=True)
    await one.until(TrainerProgress)
    meter.used = 0.6
    assert (await one.until(PauseChanged)).reason == "others use 60% of the processors"
    step = one.trainer._state.counters.step
    # It still hears: an anchor that arrives is taken, so that it stays with the others.
    await one.channel.send(ApplyAnchor(round=0, outcome="none"))
    await one.until(AnchorApplied)
    assert one.trainer._state.counters.step == step
    meter.used = 0.0
    assert (await one.until(PauseChanged)).reason == ""
    await one.until(TrainerProgress, lambda progress: progress.step > step)
    assert one.trainer._timer.seconds["pause"] > 0


async def test_who_did_not_ask_for_it_trains_on(start: Start, meter: ScriptedMeter) -> None:
    """The control."""
    one = await start(inner_steps=20, ahead=0, pause_when_busy=False)
    meter.used = 1.0
    assert (await one.until(ContributionHeader)).steps == 20


async def test_memory_makes_smaller_microbatches_of_the_same_batch(start: Start) -> None:
    """Two sequences a pass become one; what was trained on and learned is the same, but for rounding."""
    results = []
    for scarce in (False, True):
        one = await start(inner_steps=5, ahead=0)
        manifest = one.bench.manifest
        memory = fixed_bytes(manifest, "cpu") + microbatch_bytes(manifest, 1, "cpu") if scarce else None
        one.trainer._microbatch = fit_microbatch(manifest, memory, "cpu")
        assert one.trainer._microbatch == (1 if scarce else 2)
        results.append(await one.until(ContributionHeader))
        await one.stop()
    assert [(message.tokens, message.steps) for message in results] == [(320, 5)] * 2
    assert math.isclose(results[0].loss, results[1].loss, rel_tol=1e-4)


async def test_where_memory_runs_out_in_a_pass_smaller_ones_follow(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def scarce(
        model: LanguageModel, windows: torch.Tensor, microbatch: int, place: torch.Tensor | None = None
    ) -> float:
        asked.append(microbatch)
        if microbatch > 1:
            model.attach_gradient().fill_(1e9)  # what a half pass left
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return accumulate_gradient(model, windows, microbatch, place)

    monkeypatch.setattr(loop, "accumulate_gradient", scarce)
    one = await start(inner_steps=5, ahead=0)
    message = await one.until(ContributionHeader)
    assert (message.tokens, message.loss < 6) == (320, True)
    assert asked[:3] == [2, 1, 1]


async def test_the_kernel_holds_it_to_the_limit(tmp_path: Path) -> None:
    """Where the estimate was too low the kernel's limit holds, and the reason is told; the control has no limit."""
    for memory in (None, 260_000_000):
        bench = ProcessHarness(tmp_path, memory=memory)
        (tmp_path / "a.txt").write_text("far more text than fits, as it is read into memory\n" * 4_000_000)
        try:
            await bench.trainer.start()
            if memory is None:
                await bench.until(Ready)
            else:
                with pytest.raises(DeviceError, match="--memory: 260 MB do not suffice; allow more"):
                    await bench.until(Ready)
                assert bench.trainer.crash_count == 0, "starting it again would not help"
        finally:
            await bench.close()


async def test_a_run_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    bench = ProcessHarness(tmp_path, memory=1_000_000)
    try:
        await bench.trainer.start()
        with pytest.raises(DeviceError, match="--memory: 1 MB are too little"):
            await bench.until(Ready)
    finally:
        await bench.close()


async def test_all_libraries_are_told_the_number_of_threads(tmp_path: Path) -> None:
    bench = ProcessHarness(tmp_path, threads=3)
    try:
        await bench.trainer.start()
        await bench.until(Ready)
        environment = psutil.Process(bench.trainer.pid).environ()
        assert {environment[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"3"}
    finally:
        await bench.close()

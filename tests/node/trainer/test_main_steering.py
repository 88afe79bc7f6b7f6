"""The trainer follows the organiser: rates from an anchor on, also in its next process, and rest."""

from pathlib import Path

import pytest

from node.step_settings import StepSettings
from node.trainer.ipc.channel import (
    AnchorApplied,
    ApplyAnchor,
    ContributionHeader,
    Ready,
    SetResting,
    Snapshotted,
    TakeSnapshot,
    TrainerProgress,
)
from tests.node.trainer.process_harness import ProcessHarness

pytestmark = pytest.mark.slow


async def steps(bench: ProcessHarness) -> int:
    await bench.trainer.send(TakeSnapshot())
    return (await bench.until(Snapshotted)).step


async def test_trainer_uses_a_revised_learning_rate_from_an_anchor_on_and_after_a_restart(tmp_path: Path) -> None:
    bench = ProcessHarness(tmp_path, recipe="diloco", inner_steps=10, ahead=0)
    revised = bench.manifest.train.model_copy(update={"learning_rate": 0.004})
    try:
        await bench.trainer.start()
        await bench.until(ContributionHeader)
        rates = {message.learning_rate for message in bench.seen if isinstance(message, TrainerProgress)}
        assert rates == {0.01}
        bench.arena.anchor(1).copy_(bench.arena.anchor(0))
        settings = StepSettings(train=revised, weights=(1.0,))
        bench.trainer.round, bench.trainer.settings = 1, settings
        await bench.trainer.send(ApplyAnchor(round=1, outcome="included", settings=settings))
        await bench.until(AnchorApplied)
        assert (await bench.until(TrainerProgress)).learning_rate == 0.004
        assert bench.trainer._run is not None
        bench.trainer._run.kill()
        await bench.until(Ready)
        bench.arena.anchor(2).copy_(bench.arena.anchor(1))
        await bench.trainer.send(ApplyAnchor(round=2, outcome="included"))
        await bench.until(AnchorApplied)
        assert (await bench.until(TrainerProgress)).learning_rate == 0.004, "an anchor without rates changes none"
    finally:
        await bench.close()


async def test_trainer_rests_until_the_run_goes_on(tmp_path: Path) -> None:
    bench = ProcessHarness(tmp_path, recipe="diloco", inner_steps=100_000, ahead=100_000)
    try:
        await bench.trainer.start()
        await bench.until(TrainerProgress)
        await bench.trainer.send(SetResting(is_resting=True))
        resting = await steps(bench)
        assert [await steps(bench) for _ in range(3)] == [resting] * 3
        await bench.trainer.send(SetResting(is_resting=False))
        await bench.until(TrainerProgress)
        assert await steps(bench) > resting
    finally:
        await bench.close()

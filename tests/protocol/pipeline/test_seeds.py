"""Seeded swarms with faults: every microbatch ends, counts at most once at each stage, and leaves no memory behind."""

import pytest

from node.simulation.virtual.stage import InvariantError
from tests.protocol.pipeline.virtual.bugs import BUGS, Bug
from tests.protocol.pipeline.virtual.scenario import Scenario
from tests.protocol.pipeline.virtual.seeded_run import SeededRun

SEEDS, LONG_SEEDS, BATCH = 100, 2000, 100
SEARCHED = 60


@pytest.mark.slow
def test_faults_lose_and_double_nothing_in_silence() -> None:
    ends: set[str] = set()
    for seed in range(SEEDS):
        run = SeededRun(seed)
        run.run()
        ends |= set(run.world.begun.values())
    assert ends >= {"done", "refused", "owner died"}


@pytest.mark.seeds
@pytest.mark.parametrize("first", range(SEEDS, LONG_SEEDS, BATCH))
def test_thousands_of_seeds(first: int) -> None:
    for seed in range(first, first + BATCH):
        SeededRun(seed).run()


@pytest.mark.slow
def test_without_faults_everything_is_done() -> None:
    for seed in range(10):
        run = SeededRun(seed, faults=())
        run.run()
        assert set(run.world.begun.values()) == {"done"}


@pytest.mark.slow
@pytest.mark.parametrize("sends", [True, False])
def test_stages_that_need_tokens_refuse_tasks_without_them(sends: bool) -> None:
    scenario = Scenario(((4.0, 4.0),) * 3, stages_need_tokens=True, owners_send_tokens=sends)
    run = SeededRun(1, (), scenario)
    run.run()
    assert set(run.world.begun.values()) == {"done" if sends else "refused"}


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "word", "first"), BUGS, ids=lambda value: getattr(value, "__name__", None))
def test_each_bug_is_found(bug: Bug, word: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    found = next((seed for seed in range(first, first + SEARCHED) if word in outcome(seed)), None)
    assert found is not None, f"no seed shows {word!r}"
    print(f"seed {found}: {word}")
    monkeypatch.undo()
    assert outcome(found) == "", "the same seed without the bug"


def outcome(seed: int) -> str:
    try:
        SeededRun(seed).run()
    except InvariantError as broken:
        return str(broken)
    return ""

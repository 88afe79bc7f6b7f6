"""A trainer killed at any instant: its successor has the state before a change or after it, never one in between."""

from collections.abc import Callable, Iterator

import pytest
import torch

from node.model import initial_weights
from node.trainer.counters import Counters
from node.trainer.ipc.channel import ContributionOutcome
from node.trainer.ipc.shared_memory import SharedMemory
from node.trainer.vectors import TrainerVectors
from optim.inner.base import WEIGHTS
from optim.kernels.vectors import slabs
from tests.node.trainer.state_harness import MODEL, NUMEL, StateHarness, copy_arena

RECIPES = ["frugal", "averaging", "eager-diloco", "streaming-diloco", "des-loc", "noloco", "data-parallel"]
SLAB = NUMEL // 3


class KilledError(Exception):
    """In the place of a signal."""


class Killer:
    """Ends the process, as it were, at the n-th slab or publication."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        publish = SharedMemory.publish

        def count_publication(memory: SharedMemory, *arguments: object) -> int:
            self.count()
            generation = publish(memory, *arguments)  # type: ignore[arg-type]
            self.count()
            return generation

        def count_slabs(numel: int, size: int) -> Iterator[slice]:
            for slab in slabs(numel, SLAB):
                self.count()
                yield slab

        monkeypatch.setattr(SharedMemory, "publish", count_publication)
        monkeypatch.setattr("node.trainer.vectors.slabs", count_slabs)

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KilledError

    def runs_to_its_end(self, moments: int, work: Callable[[], object]) -> bool:
        """Return whether the work ends before so many slabs and publications."""
        self.left = moments
        try:
            work()
        except KilledError:
            return False
        finally:
            self.left = 0
        return True


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Killer:
    return Killer(monkeypatch)


def start(recipe: str) -> StateHarness:
    """Return a state that has a residual, moments, and has trained."""
    bench = StateHarness(recipe)
    for name, vector in bench.optimizer.vectors.items():
        vector.copy_(torch.rand(vector.numel(), generator=torch.Generator().manual_seed(len(name))) * 1e-3)
    noise = torch.randn(bench.state.residual.numel(), generator=torch.Generator().manual_seed(2))
    bench.state.residual.copy_(1e-3 * noise)
    bench.train(1)
    bench.state.save()
    return bench


def read_all(bench: StateHarness) -> list[torch.Tensor]:
    return [*bench.vectors.values(), bench.state.residual, bench.state.reference]


def is_equal(one: StateHarness, other: StateHarness) -> bool:
    pairs = zip(read_all(one), read_all(other), strict=True)
    return one.state.counters == other.state.counters and all(torch.equal(*pair) for pair in pairs)


def sweep(killer: Killer, recipe: str, before: StateHarness, work: Callable[[StateHarness], object]) -> list[bool]:
    """Kill the work at each moment and continue; return for each whether the successor found it done."""
    done = StateHarness(recipe, arena=copy_arena(before.arena))
    work(done)
    found = []
    for moment in range(1, 1000):
        mortal = StateHarness(recipe, arena=copy_arena(before.arena))
        if killer.runs_to_its_end(moment, lambda: work(mortal)):  # noqa: B023
            break
        successor = StateHarness(recipe, arena=mortal.arena)
        found.append(not is_equal(successor, before))
        if not is_equal(successor, done):
            work(successor)
        assert is_equal(successor, done), f"moment {moment}"
    assert found == sorted(found) and {*found} == {False, True}, "first not done, then done"
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_contribution_is_made_once_whenever_its_trainer_dies(recipe: str, killer: Killer) -> None:
    sweep(killer, recipe, start(recipe), lambda bench: bench.state.make_contribution())


@pytest.mark.parametrize("outcome", ["included", "excluded"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_anchor_is_applied_once_whenever_the_trainer_dies(
    recipe: str, outcome: ContributionOutcome, killer: Killer
) -> None:
    before = start(recipe)
    before.state.make_contribution()
    before.train(2)
    before.state.save()
    before.share(1, initial_weights(MODEL, 1))

    def apply(bench: StateHarness) -> None:
        if bench.state.counters.round == 0:
            settled = bench.state.counters.outstanding is None
            bench.state.apply_anchor(1, "none" if settled else outcome)
            bench.state.counters = bench.state.counters.model_copy(update={"obstacle": "", "anchors": ()})

    done = StateHarness(recipe, arena=copy_arena(before.arena))
    apply(done)
    for moment in range(1, 1000):
        mortal = StateHarness(recipe, arena=copy_arena(before.arena))
        if killer.runs_to_its_end(moment, lambda: apply(mortal)):  # noqa: B023
            break
        successor = StateHarness(recipe, arena=mortal.arena)
        apply(successor)
        successor.state.counters = successor.state.counters.model_copy(update={"obstacle": "", "anchors": ()})
        assert is_equal(successor, done), f"moment {moment}"
    assert moment > 8


def test_control_whose_successor_finishes_nothing_is_torn(killer: Killer, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: TrainerVectors) -> Counters | None:
        snapshot = self._shared_memory.read_snapshot()
        return None if snapshot is None else Counters.model_validate(snapshot.meta)

    monkeypatch.setattr(TrainerVectors, "read", read)
    with pytest.raises((AssertionError, ValueError)):
        sweep(killer, "frugal", start("frugal"), lambda bench: bench.state.make_contribution())


def test_trainer_killed_in_a_step_continues_from_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = start("frugal")
    bench.state.make_contribution()
    moved = bench.train(2)
    assert bench.state.counters.since_message.steps == 2
    gradient = bench.model.attach_gradient()
    gradient.copy_(moved)

    def die(*_: object) -> None:
        bench.weights[: NUMEL // 2] += 1.0
        raise KilledError

    monkeypatch.setattr(bench.optimizer, "apply", die)
    with pytest.raises(KilledError):
        bench.state.take_step(24, 1.0, 9)
    successor = StateHarness("frugal", arena=bench.arena)
    assert torch.equal(successor.vectors[WEIGHTS], successor.state.reference)
    counters = successor.state.counters
    assert (counters.since_message.steps, counters.messages) == (0, 1) and counters.obstacle
    assert counters.outstanding is not None, "its outcome is still to come"

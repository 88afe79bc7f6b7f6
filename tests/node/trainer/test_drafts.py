"""A contribution that a thread encodes while steps are made is the one that would have been made at once."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import pytest
import torch

from node.trainer.exchange_loop import ExchangeLoop
from node.trainer.inner_step import ValidationLoss
from node.trainer.ipc.channel import TrainerChannel, TrainerConfig
from tests.node.trainer.state_harness import StateHarness, copy_arena
from tests.optim.fake_peers import Tables

AHEAD: Tables = {"schedule": {"inner_steps": 4, "ahead": 4}}


class LateThread(Executor):
    """Computes when the test says so."""

    def __init__(self) -> None:
        self._work: list[Callable[[], None]] = []

    def submit(self, function: Callable[..., Any], /, *words: Any, **more: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.append(lambda: future.set_result(function(*words, **more)))
        return future

    def run(self) -> None:
        self._work.pop(0)()


@pytest.fixture
def benches() -> Iterator[list[StateHarness]]:
    made = [StateHarness("frugal", AHEAD, copies=True) for _ in range(2)]
    yield made
    for bench in made:
        bench.close()


def test_draft_is_the_contribution_of_the_moment_at_which_it_began(benches: list[StateHarness]) -> None:
    at_once, drafted = benches
    thread = LateThread()
    for number in range(3):
        for bench in benches:
            bench.train(number, steps=4)
        headers = [at_once.state.make_contribution()]
        drafted.state.draft_contribution(thread)
        for bench in benches:
            bench.train(10 + number, steps=2)
        assert drafted.state.draft_steps == 2 and not drafted.state.is_draft_encoded
        thread.run()
        headers.append(drafted.state.make_contribution())
        assert headers[0] == headers[1] and at_once.payloads() == drafted.payloads()
        assert at_once.state.counters == drafted.state.counters
        assert drafted.state.counters.since_message.steps == 2 and drafted.state.draft_steps is None
        for bench in benches:
            bench.share(number + 1, bench.anchor + 0.01)
            bench.state.apply_anchor(number + 1, "excluded" if number == 1 else "included")
    for name, vector in at_once.vectors.items():
        assert torch.equal(drafted.vectors[name], vector), name


@pytest.mark.parametrize("is_finished", [False, True])
def test_trainer_that_dies_after_steps_beside_a_draft_loses_these_steps_only(
    benches: list[StateHarness], is_finished: bool
) -> None:
    bench, thread = benches[0], LateThread()
    bench.train(0, steps=4)
    bench.state.draft_contribution(thread)
    at_draft = bench.weights.clone()
    bench.train(1, steps=2)
    if is_finished:
        thread.run()
        bench.state.make_contribution()
    arena = copy_arena(bench.arena)
    restored = StateHarness("frugal", AHEAD, arena=arena, copies=True)
    assert restored.state.counters.step == 4 and torch.equal(restored.weights, at_draft)
    assert restored.state.counters.since_message.steps == (0 if is_finished else 4)
    assert (restored.state.counters.outstanding is None) is not is_finished
    arena.close()


@pytest.mark.parametrize(
    ("recipe", "tables", "copies", "can"),
    [
        ("frugal", AHEAD, True, True),
        ("frugal", AHEAD, False, False),  # the steps change what the thread would read
        ("diloco", {}, True, False),  # no step may be made before the result
        ("distro", {}, True, False),  # a step adds to the gradient that the contribution consumes
    ],
)
def test_draft_needs_memory_of_its_own_and_leave_to_train_ahead(
    recipe: str, tables: Tables, copies: bool, can: bool
) -> None:
    bench = StateHarness(recipe, tables, copies=copies)
    assert bench.state.can_draft is can
    bench.close()


class Loop(ExchangeLoop):
    """An exchange loop whose steps are the harness's."""

    device = "cuda"
    encodes_aside = True

    def __init__(self, bench: StateHarness, channel: TrainerChannel, thread: Executor) -> None:
        config = TrainerConfig(base=".", blobs=".", peer_id="12D3KooW", manifest="", round=0)
        super().__init__(config, bench.state, bench.arena, channel)
        self._encoding.shutdown()
        self._encoding = thread  # type: ignore[assignment]

    def learning_rate(self, step: int) -> float:
        return 0.0

    def validate(self, round_number: int) -> ValidationLoss:
        raise NotImplementedError


def test_loop_makes_steps_beside_a_draft_until_it_may_make_no_more(benches: list[StateHarness]) -> None:
    bench, thread = benches[0], LateThread()
    ours, theirs = socket.socketpair()
    loop = Loop(bench, TrainerChannel(ours), thread)
    for number in range(4):
        assert loop.prepare_step()
        bench.train(number, steps=1)
    for number in range(3):
        assert loop.prepare_step() and bench.state.draft_steps == number
        bench.train(10 + number, steps=1)
    thread.run()
    assert loop.prepare_step() and bench.state.draft_steps is None
    assert bench.state.counters.outstanding is not None and bench.state.counters.since_message.steps == 3
    ours.close()
    theirs.close()

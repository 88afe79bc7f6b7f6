"""What a thread does while a card makes steps comes to the same as if the card had waited."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import pytest
import torch

from node.trainer.exchange_loop import ExchangeLoop
from node.trainer.inner_step import ValidationLoss
from node.trainer.ipc.channel import ApplyAnchor, ContributionOutcome, TrainerChannel, TrainerConfig, encode_frame
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
    encodes_aside = adopts_aside = True

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


@pytest.mark.parametrize("outcome", ["included", "excluded", "none"])
def test_anchor_applied_beside_steps_is_the_one_applied_after_them(
    benches: list[StateHarness], outcome: ContributionOutcome
) -> None:
    thread = LateThread()
    at_once, beside = benches
    for number in range(3):
        for bench in benches:
            bench.train(number, steps=4)
            if bench.state.counters.outstanding is None:
                bench.state.make_contribution()
            bench.train(10 + number, steps=1)
            bench.share(number + 1, bench.anchor + 0.01)
        beside.state.save()
        beside.train(20 + number, steps=1)
        beside.state.begin_adoption(thread, number + 1, outcome)
        beside.train(30 + number, steps=1)
        thread.run()
        assert beside.state.is_adopted
        beside.state.finish_adoption()
        at_once.train(20 + number, steps=1)
        at_once.train(30 + number, steps=1)
        at_once.state.apply_anchor(number + 1, outcome)
        assert at_once.state.counters == beside.state.counters and not beside.state.is_adopting
        for name, vector in at_once.vectors.items():
            torch.testing.assert_close(beside.vectors[name], vector, atol=1e-6, rtol=1e-6)


def test_trainer_that_dies_after_an_anchor_beside_steps_has_applied_it_to_its_last_copy(
    benches: list[StateHarness],
) -> None:
    bench, thread = benches[0], LateThread()
    bench.train(0, steps=4)
    bench.state.make_contribution()
    bench.train(1, steps=1)
    bench.state.save()
    copied = bench.weights.clone()
    bench.train(2, steps=2)
    bench.share(1, bench.anchor + 0.01)
    reference = bench.state.reference.clone()
    bench.state.begin_adoption(thread, 1, "included")
    thread.run()
    arena = copy_arena(bench.arena)
    restored = StateHarness("frugal", AHEAD, arena=arena, copies=True)
    counters = restored.state.counters
    assert (counters.round, counters.step, counters.since_message.steps, counters.outstanding) == (1, 5, 1, None)
    torch.testing.assert_close(restored.weights, copied + restored.state.reference - reference)
    arena.close()


@pytest.mark.parametrize(
    ("recipe", "tables", "can"),
    [
        ("frugal", {}, True),
        ("streaming-diloco", {}, False),  # mixes the weights of the moment
        ("co2", {}, False),  # keeps nothing of them
        ("local-adam", {}, False),  # moves the moments too
    ],
)
def test_anchor_beside_steps_needs_a_method_that_keeps_all_of_them(recipe: str, tables: Tables, can: bool) -> None:
    bench = StateHarness(recipe, tables, copies=True)
    assert bench.state.can_adopt_beside is can
    bench.close()


def test_loop_makes_steps_while_a_checkpoint_is_written_as_long_as_it_may(benches: list[StateHarness]) -> None:
    bench, thread = benches[0], LateThread()
    ours, theirs = socket.socketpair()
    loop = Loop(bench, TrainerChannel(ours), thread)
    bench.train(0, steps=4)
    with bench.arena._held():
        for number in range(4):
            assert loop.prepare_step() and bench.state.draft_steps is None
            bench.train(10 + number, steps=1)
    bench.train(20, steps=0)
    assert loop.prepare_step() and bench.state.draft_steps == 0
    ours.close()
    theirs.close()


def test_loop_makes_steps_beside_an_anchor_and_reports_it_once_it_is_applied(benches: list[StateHarness]) -> None:
    bench, thread = benches[0], LateThread()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    loop = Loop(bench, TrainerChannel(ours), thread)
    bench.train(0, steps=4)
    bench.state.make_contribution()
    bench.share(1, bench.anchor + 0.01)
    theirs.send(encode_frame(ApplyAnchor(round=1, outcome="included")))
    for number in range(3):
        assert loop.prepare_step() and bench.state.is_adopting and bench.state.counters.round == 0
        bench.train(10 + number, steps=1)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
    thread.run()
    assert loop.prepare_step() and not bench.state.is_adopting and bench.state.counters.round == 1
    assert b'"adopted"' in theirs.recv(1 << 16)
    ours.close()
    theirs.close()

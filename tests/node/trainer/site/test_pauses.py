"""A machine that comes back meets the start of the first machine, whose every start it may have caused itself."""

import random
from collections.abc import Callable

import pytest

from node.trainer.site.agent import (
    LONG_PAUSE_SECONDS,
    MAX_PAUSE_SECONDS,
    SHORT_PAUSE_SECONDS,
    START_SECONDS,
    End,
    Pauses,
)

GATHER, NOTICE = 1.0, 0.5  # seconds that a start waits for machines, and until it notices one that has come later
MAX_STARTS = 8
After = Callable[[End, float, float], float]


def growing() -> After:
    """Return the control: each attempt that a start of the first machine has ended makes the next pause longer."""
    delay = SHORT_PAUSE_SECONDS

    def after(end: End, now: float, lasted: float) -> float:
        nonlocal delay
        pause = delay
        delay = min(2 * delay, LONG_PAUSE_SECONDS if end == "no connection" else MAX_PAUSE_SECONDS)
        return pause

    return after


def count_starts(after: After, seed: int) -> int:
    """Return the starts of the first machine until one has waited for the other; at most `MAX_STARTS`."""
    chance = random.Random(seed)
    now, listens_at = 0.0, chance.uniform(0, 10)
    for starts in range(1, MAX_STARTS):
        while now < listens_at:
            now += after("no connection", now, 0.0)
        if now <= listens_at + GATHER:
            return starts
        left_at = now + chance.uniform(0, NOTICE)
        listens_at = left_at + chance.uniform(2, 12)  # the trainer of the first machine imports torch
        now = left_at + after("first machine restarts", left_at, left_at - now)
    return MAX_STARTS


def test_a_machine_that_was_left_is_back_for_the_next_start() -> None:
    counts = [count_starts(Pauses().after, seed) for seed in range(500)]
    assert max(counts) == 1
    control = [count_starts(growing(), seed) for seed in range(500)]
    assert max(control) == MAX_STARTS and sum(control) > 2 * sum(counts), sum(control)


def test_pauses_after_the_end_of_our_ranks_grow_and_begin_again_after_a_steady_time() -> None:
    pauses = Pauses()
    assert [pauses.after("ranks ended", 0.0, 5.0) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    assert pauses.after("first machine restarts", 0.0, 5.0) == SHORT_PAUSE_SECONDS, "that is no failure of ours"
    assert pauses.after("ranks ended", 0.0, 100.0) == SHORT_PAUSE_SECONDS


@pytest.mark.parametrize("end", ["first machine restarts", "ranks ended"])
def test_a_first_machine_that_stays_away_is_asked_less_often(end: End) -> None:
    pauses = Pauses()
    pauses.after(end, 10.0, 1.0)
    assert pauses.after("no connection", 9.0 + START_SECONDS, 0.0) == SHORT_PAUSE_SECONDS
    assert pauses.after("no connection", 11.0 + START_SECONDS, 0.0) == LONG_PAUSE_SECONDS

"""What counts of the work of peers that die, and the bars of it."""

import pytest

from benchmarks.failing.swarm import BATCH_TOKENS, Life, Record
from benchmarks.goodput import draw, possible, read_results, share_at_work

RATE = BATCH_TOKENS / 0.25  # of the only peer


def record(made: int = 0) -> Record:
    """One peer: a life from 0 s to 100 s, ready at 10 s, and the next from 150 s to the end, ready at 160 s."""
    lives = [Life(0.0, ready=10.0, ended=100.0, made=made), Life(150.0, ready=160.0, made=made)]
    return Record(ended=200.0, lives={"a": lives}, included={"a": [(50.0, 1), (90.0, 1)]})


def test_starts_count_for_all_and_work_after_the_last_commit_not_for_the_living() -> None:
    assert possible(record(), to_last_commit=True) == RATE * (90 - 10 + 200 - 160)
    assert possible(record(), to_last_commit=False) == RATE * (100 + 200 - 150)


def test_share_at_work_is_that_of_the_time_since_the_first_step() -> None:
    assert share_at_work(record(made=int(RATE * 45))) == pytest.approx(90 / (90 + 40))


def test_plot_has_three_bars_for_each_share_of_deaths() -> None:
    rows = read_results()
    assert draw(rows).count("<rect") == 1 + 3 + 3 * len(rows)

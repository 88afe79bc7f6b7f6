"""What counts of the work of peers that die, and the bars of it."""

import pytest

from benchmarks.failing.swarm import BATCH_TOKENS, Life, Record
from benchmarks.goodput import draw, read_results, share_at_work, share_of_all, share_of_living

RATE = BATCH_TOKENS / 0.25  # of the only peer


def record(made: int = 0, *, taken: int = 1, ended: float = 200.0) -> Record:
    """One peer: a life from 0 s to 100 s, ready at 10 s, and the next from 150 s to the end, ready at 160 s."""
    lives = [Life(0.0, ready=10.0, ended=100.0, made=made), Life(150.0, ready=160.0, made=made)]
    included = {"a": [(50.0, taken), (90.0, taken)]}
    return Record(ended=ended, round_seconds=90.0, lives={"a": lives}, tokens=2 * taken, included=included)


def test_starts_count_for_all_and_work_after_the_last_commit_not_for_the_living() -> None:
    taken = int(RATE * 30)
    assert share_of_living(record(taken=taken)) == pytest.approx(60 / (90 - 10))
    assert share_of_all(record(taken=taken)) == pytest.approx(60 / (100 + 200 - 150))


def test_life_counts_for_no_more_than_it_could_make() -> None:
    assert share_of_living(record(taken=int(RATE * 1000))) == 1.0


def test_peer_that_lives_on_and_is_left_out_loses_its_work() -> None:
    taken, late = int(RATE * 40), 400.0
    assert share_of_living(record(taken=taken, ended=late)) == pytest.approx(80 / (90 - 10 + late - 160))


def test_share_at_work_is_that_of_the_time_since_the_first_step() -> None:
    assert share_at_work(record(made=int(RATE * 45))) == pytest.approx(90 / (90 + 40))


def test_plot_has_three_bars_for_each_share_of_deaths() -> None:
    rows = read_results()
    assert draw(rows).count("<rect") == 1 + 3 + 3 * len(rows)

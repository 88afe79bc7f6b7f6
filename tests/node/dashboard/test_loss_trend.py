"""Warnings about the loss."""

import random

import pytest

from node.dashboard.events import ChainForked, ValidationMeasured
from node.dashboard.json_views import summary
from node.dashboard.rounds import RISING_MEASUREMENTS, LossTrend, find_warnings
from tests.node.dashboard.example_events import NAMES, apply_all, committed, opening_events


def trend(losses: list[float], validations: list[float]) -> LossTrend:
    found = LossTrend()
    for loss in losses:
        found = found.add_loss(loss)
    for number, loss in enumerate(validations):
        found = found.add_validation(5 * (number + 1), loss)
    return found


def test_validation_loss_that_rises_for_long_is_a_warning() -> None:
    rising = [4.0, 2.88, 3.0, 3.3, 3.6, 4.0, 4.65]
    (sentence,) = find_warnings(trend([4.0, 2.0], rising))
    assert "from 2.880 after round 10 to 4.650 after round 35" in sentence and sentence.endswith(
        "learning rate (murmur steer)."
    )
    assert not find_warnings(trend([4.0, 2.0], rising[:-1])), "one measurement fewer"
    assert not find_warnings(trend([4.0, 2.0], [2.88, *(2.9 for _ in range(9))])), "within three percent"
    assert not find_warnings(trend([4.0, 2.0], [*rising, 2.8])), "a new best one"


@pytest.mark.parametrize("seed", range(20))
def test_noise_around_a_falling_loss_is_no_warning(seed: int) -> None:
    rng = random.Random(seed)
    found = LossTrend()
    for number in range(200):
        loss = 1.5 + 3 / (1 + number / 10) + rng.gauss(0, 0.01)
        found = found.add_loss(loss + rng.gauss(0, 0.05)).add_validation(number, loss)
        assert not find_warnings(found), (seed, number)


def test_training_loss_above_that_of_the_first_round_is_a_warning() -> None:
    (sentence,) = find_warnings(trend([5.0, 4.0, 5.1, 5.2, 6.0], []))
    assert "6.000, is above that of the first round, 5.000" in sentence
    assert not find_warnings(trend([5.0, 4.0, 5.2, 6.0], [])), "two rounds only"
    assert not find_warnings(trend([5.0, 5.0, 5.0, 5.0], []))


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 1e6])
def test_loss_that_is_no_number_is_a_warning_at_once(loss: float) -> None:
    (sentence,) = find_warnings(trend([5.0, loss], []))
    assert "has diverged" in sentence


def test_warnings_follow_the_events_and_end_with_a_fork() -> None:
    rounds = [committed(number) for number in range(20)]
    state = apply_all([*opening_events(), *rounds])
    assert summary(state, 1.0)["warnings"] == ()
    measured = [
        ValidationMeasured(at=1.0, peer=NAMES[0], round=number + 1, loss=2.0 + number / 10)
        for number in range(RISING_MEASUREMENTS + 1)
    ]
    state = apply_all(measured, state)
    assert len(summary(state, 1.0)["warnings"]) == 1
    assert summary(apply_all([ChainForked(at=1.0, round=4)], state), 1.0)["warnings"] == ()

"""When a message is due, and when a trainer waits."""

import pytest

from node.trainer.counters import Counters, Outstanding, StepTotals
from node.trainer.schedule import ContributionTimer, StepTarget, is_contribution_due, may_apply_anchor, must_wait
from optim.options import Scalar
from optim.round_plan import RoundPlan
from optim.schedules.exchange_schedule import EverySteps
from tests.optim.fake_peers import make_planner


def counters(since: int, outstanding: bool) -> Counters:
    on_its_way = Outstanding(round=0, sizes=(1,), work=StepTotals()) if outstanding else None
    return Counters(since_message=StepTotals(steps=since), outstanding=on_its_way)


@pytest.mark.parametrize(("since", "outstanding", "due"), [(4, False, False), (5, False, True), (9, True, False)])
def test_a_message_is_due_after_its_steps_once_no_other_is_on_its_way(since: int, outstanding: bool, due: bool) -> None:
    assert is_contribution_due(counters(since, outstanding), 5, EverySteps(), 1e9) is due


@pytest.mark.parametrize(
    ("since", "seconds", "due"), [(1, 9.0, False), (1, 99.0, False), (2, 9.9, False), (2, 10.0, True), (5, 0.0, True)]
)
def test_time_makes_a_message_due_too_once_the_least_is_made(since: int, seconds: float, due: bool) -> None:
    schedule = EverySteps(inner_steps=5, least_steps=2, seconds=10.0)
    assert is_contribution_due(counters(since, False), 5, schedule, seconds) is due
    assert not is_contribution_due(counters(since, True), 5, schedule, seconds), "one at a time"


def test_the_time_counts_from_the_first_step() -> None:
    stretch = ContributionTimer()
    assert [stretch.seconds(steps, steps, now) for steps, now in ((3, 50.0), (4, 52.0))] == [0, 2], "after a restart"
    asked = ((0, 60.0), (0, 70.0), (1, 71.0), (2, 75.0))
    assert [stretch.seconds(steps, 4 + steps, now) for steps, now in asked] == [0, 0, 1, 5]


def test_steps_made_while_a_contribution_is_encoded_count_from_its_beginning() -> None:
    """On a card nobody asks in between, and the steps since then may be more than before."""
    stretch = ContributionTimer()
    asked = ((0, 0, 10.0), (5, 5, 20.0), (7, 12, 34.0), (8, 13, 36.0))
    assert [stretch.seconds(*each) for each in asked] == [0, 10, 14, 16]


@pytest.mark.parametrize(
    ("asked", "number", "due_after"), [(None, 3, 20), (5, 3, 5), (5, 4, 20), (0, 3, 1), (24, 3, 24), (99, 3, 40)]
)
def test_other_steps_make_a_message_due_for_the_round_that_they_are_asked_for(
    asked: int | None, number: int, due_after: int
) -> None:
    wanted = StepTarget()
    assert wanted.steps_due(20, 3) == 20
    wanted.set(number, asked)
    assert wanted.steps_due(20, 3) == due_after


def plan(ahead: int, delay: int = 0) -> RoundPlan:
    schedule: dict[str, Scalar] = {"inner_steps": 5, "ahead": ahead, "delay": delay}
    return make_planner("averaging", {"schedule": schedule}).plan(0)


@pytest.mark.parametrize(
    ("ahead", "since", "outstanding", "waits"),
    [
        (0, 0, True, True),
        (0, 0, False, False),
        (5, 0, True, False),
        (5, 4, True, False),
        (5, 5, True, True),
        (5, 99, False, False),
        (2, 2, True, True),
        (8, 7, True, False),
    ],
)
def test_it_trains_on_ahead_of_its_message_and_then_waits(
    ahead: int, since: int, outstanding: bool, waits: bool
) -> None:
    assert must_wait(counters(since, outstanding), plan(ahead)) is waits


@pytest.mark.parametrize(
    ("delay", "since", "outstanding", "may"),
    [(0, 0, True, True), (3, 2, True, False), (3, 3, True, True), (3, 9, True, True), (3, 0, False, True)],
)
def test_a_result_is_taken_once_its_delay_is_over(delay: int, since: int, outstanding: bool, may: bool) -> None:
    assert may_apply_anchor(counters(since, outstanding), plan(5, delay)) is may


@pytest.mark.parametrize("ahead", [0, 2, 5, 9])
@pytest.mark.parametrize("delay", [0, 2, 5, 9])
def test_nobody_waits_for_what_may_not_be_taken(ahead: int, delay: int) -> None:
    if delay <= ahead:
        waiting = [since for since in range(20) if must_wait(counters(since, True), plan(ahead, delay))]
        assert all(may_apply_anchor(counters(since, True), plan(ahead, delay)) for since in waiting) and waiting

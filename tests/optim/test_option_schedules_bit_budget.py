"""A bit budget for a run, as a schedule of the steps between contributions."""

import pytest

from optim.compose import compose
from optim.errors import UnknownOption
from optim.options import OptionValue
from optim.round_plan import RoundPlanner
from optim.schedules.option_schedules import BitBudget, OptionSchedule, read_bit_budget
from tests.optim.fake_peers import LAYOUT, curve


def distances(inner_steps: int | OptionSchedule, steps: int) -> list[int]:
    """Return the steps before each contribution until the run's steps are made."""
    found: list[int] = []
    while sum(found) < steps:
        now = inner_steps.at_round(len(found)) if isinstance(inner_steps, OptionSchedule) else inner_steps
        assert isinstance(now, int)
        found.append(now)
    return found


@pytest.mark.parametrize("steps", [120, 1000])
@pytest.mark.parametrize("contributions", [8, 20, 31, 49])
def test_budget_is_spent_and_never_exceeded(steps: int, contributions: int) -> None:
    found = distances(BitBudget(bits=8.0 * contributions, steps=steps).inner_steps(8.0), steps)
    assert len(found) <= contributions
    assert len(found) >= 0.9 * contributions and found == sorted(found) and found[0] == 1
    early = sum(found[: contributions // 2]) / steps
    assert early < 0.4 or steps < 4 * contributions, "most of them early: with equal distances half of them would be"


def test_smallest_and_largest_budget() -> None:
    assert BitBudget(bits=8, steps=500).inner_steps(8.0) == 500  # a single contribution, at the end
    assert BitBudget(bits=1e6, steps=500).inner_steps(8.0) == 1
    with pytest.raises(UnknownOption, match="raise it or choose"):
        BitBudget(bits=7.9, steps=500).inner_steps(8.0)


@pytest.mark.parametrize("value", [7, "8 bits", "", curve(1, 3, 9), [{"value": 8, "rounds": 5}, 3], {}], ids=str)
def test_other_values_are_not_a_budget(value: OptionValue) -> None:
    assert read_bit_budget(value) is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"bits": 0, "steps": 500}, "bits = 0 must be greater than 0"),
        ({"bits": 8, "steps": 0}, "steps = 0 must be at least 1"),
        ({"bits": -1, "steps": 10}, "bits = -1 must be greater than 0"),
        ({"bits": float("inf"), "steps": 10}, "bits = inf must be a number of at most 1e15"),
        ({"bits": 8, "steps": 10.5}, "steps = 10.5 must be a whole number"),
        ({"bits": 8}, "steps is missing"),
        ({"bits": 8, "rounds": 10}, "unknown key 'rounds'"),
    ],
    ids=str,
)
def test_invalid_budget_is_refused_in_one_line(value: OptionValue, reason: str) -> None:
    with pytest.raises(UnknownOption) as caught:
        read_bit_budget(value)
    assert str(caught.value) == f"schedule.inner_steps: {reason}; write {{ bits = 8, steps = 500 }}"


def test_old_text_form_is_refused_with_the_table_to_write_instead() -> None:
    with pytest.raises(UnknownOption, match=r"is a table; write \{ bits = 8, steps = 500 \}$"):
        compose("averaging", {"schedule": {"inner_steps": "8 bits over 500 steps"}})


@pytest.mark.parametrize(
    ("recipe", "bits"), [("diloco", 80), ("sparseloco", 2), ("noloco", 400), ("streaming-diloco", 60)]
)
def test_every_recipe_keeps_within_the_budget(recipe: str, bits: float) -> None:
    budget: OptionValue = {"bits": bits, "steps": 400}
    planner = RoundPlanner(compose(recipe, {"schedule": {"inner_steps": budget, "ahead": 0, "delay": 0}}), LAYOUT, 1)
    spent, number = 0.0, 0
    while planner.steps_before(number + 1) <= 400:
        plan = planner.plan(number)
        spent += plan.codecs[0].bits_per_parameter(10**6) * plan.numel / planner.numel
        number += 1
    assert 0.75 * bits < spent <= bits * 1.01


def test_budget_is_refused_for_a_codec_that_changes() -> None:
    budget: OptionValue = {"bits": 8, "steps": 500}
    with pytest.raises(UnknownOption, match="does not change"):
        compose("sparseloco", {"schedule": {"inner_steps": budget}, "codec": {"k": curve(64, 8, 9)}})

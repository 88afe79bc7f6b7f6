"""Bits that are given for a run, as a course of steps between messages."""

import pytest

from optim.budget import Budget, budget
from optim.compose import compose
from optim.errors import UnknownOption
from optim.round_plan import RoundPlanner
from tests.optim.fake_peers import LAYOUT


def distances(course: object, steps: int) -> list[int]:
    """Steps before each message until the run's are made."""
    method = compose("averaging", {"schedule": {"inner_steps": str(course) if isinstance(course, str) else 1}})
    found: list[int] = []
    while sum(found) < steps:
        found.append(method.at_round(len(found)).schedule.inner_steps)
    return found


@pytest.mark.parametrize("steps", [120, 1000])
@pytest.mark.parametrize("messages", [8, 20, 31, 49])
def test_it_is_spent_but_never_more_than_that(steps: int, messages: int) -> None:
    course = Budget(8.0 * messages, steps).course(8.0)
    found = distances(course, steps)
    assert len(found) <= messages
    assert len(found) >= 0.9 * messages and found == sorted(found) and found[0] == 1
    early = sum(found[: messages // 2]) / steps
    assert early < 0.4 or steps < 4 * messages, "most of them early: of equal distances these would be half"


def test_the_least_and_the_most() -> None:
    assert Budget(8.0, 500).course(8.0) == 500  # a single message, at the end
    assert Budget(1e6, 500).course(8.0) == 1
    with pytest.raises(UnknownOption, match="raise it or choose"):
        Budget(7.9, 500).course(8.0)


@pytest.mark.parametrize("text", ["8 until 5 then 3", "1 -> 3 over 9", "eight bits over 5 steps", "8 bits", ""])
def test_other_texts_are_none(text: str) -> None:
    assert budget(text) is None and budget(7) is None


@pytest.mark.parametrize("text", ["0 bits over 500 steps", "8 bits over 0 steps", "-1 bits over 10 steps"])
def test_nothing_cannot_be_spent(text: str) -> None:
    with pytest.raises(UnknownOption, match="above zero"):
        budget(text)


@pytest.mark.parametrize(
    ("recipe", "bits"), [("diloco", 80), ("sparseloco", 2), ("noloco", 400), ("streaming-diloco", 60)]
)
def test_any_recipe_keeps_to_it(recipe: str, bits: float) -> None:
    program = RoundPlanner(
        compose(recipe, {"schedule": {"inner_steps": f"{bits} bits over 400 steps", "ahead": 0, "delay": 0}}), LAYOUT, 1
    )
    spent, number = 0.0, 0
    while program.steps_before(number + 1) <= 400:
        plan = program.plan(number)
        spent += plan.codecs[0].bits_per_parameter(10**6) * plan.numel / program.numel
        number += 1
    assert 0.75 * bits < spent <= bits * 1.01


def test_a_codec_that_changes_has_no_price() -> None:
    with pytest.raises(UnknownOption, match="does not change"):
        compose("sparseloco", {"schedule": {"inner_steps": "8 bits over 500 steps"}, "codec": {"k": "64 -> 8 over 9"}})

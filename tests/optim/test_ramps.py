"""Options that change over the rounds."""

import itertools
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optim.compose import compose
from optim.errors import UnknownOption
from optim.options import Scalar
from optim.ramps import MAX_LETTERS, Ramp, ramp

numbers = st.floats(0.001, 1000).map(lambda value: f"{value:.6g}") | st.integers(1, 500).map(str)
curves = st.sampled_from(["->", "=>", "~>"])


@st.composite
def courses(draw: st.DrawFn) -> str:
    """Any course of numbers: a curve, or up to three steps and then a curve or a number."""
    curve = f"{draw(numbers)} {draw(curves)} {draw(numbers)} over {draw(st.integers(0, 40))}"
    steps = [f"{draw(numbers)} until {draw(st.integers(0, 30))} then " for _ in range(draw(st.integers(0, 3)))]
    last = curve if not steps or draw(st.booleans()) else draw(numbers)
    return "".join(steps) + last


def course(text: str) -> Ramp:
    found = ramp(text)
    assert found is not None
    return found


def values(found: Ramp, rounds: int) -> list[float]:
    return [float(found.at(number)) for number in range(rounds)]


@pytest.mark.parametrize(
    ("text", "rounds", "expected"),
    [
        ("0.5 -> 0.9 over 4", (0, 1, 2, 4, 99), (0.5, 0.6, 0.7, 0.9, 0.9)),
        ("1 ~> 0.1 over 4", (0, 2, 4, 99), (1.0, 0.55, 0.1, 0.1)),
        ("0.01 => 1 over 2", (0, 1, 2, 99), (0.01, 0.1, 1.0, 1.0)),
        ("1 until 50 then 30", (0, 49, 50, 99), (1, 1, 30, 30)),
        ("2 until 3 then 4 -> 8 over 2", (2, 3, 4, 5, 9), (2, 4, 6, 8, 8)),
        ("1 until 2 then 5 until 3 then 7", (1, 2, 4, 5), (1, 5, 5, 7)),
        ("-1 -> 1.0 over 2", (0, 1, 2), (-1.0, 0.0, 1.0)),
        ("1e-3 -> 2e-3 over 1", (0, 1), (0.001, 0.002)),
    ],
)
def test_courses_by_hand(text: str, rounds: tuple[int, ...], expected: tuple[float, ...]) -> None:
    assert [course(text).at(number) for number in rounds] == pytest.approx(expected)


def test_the_courses_that_are_documented_are_some() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "recipes.md"
    text = page.read_text().split("## Courses over the run")[1]
    written = re.findall(r'^\| `"(.+)"` \|', text, re.MULTILINE)
    assert len(written) == 5 and all(ramp(line) for line in written)
    budgets = re.findall(r'schedule\.inner_steps = "(.+?)"', text)
    assert budgets and all(compose("averaging", {"schedule": {"inner_steps": line}}).breakpoints for line in budgets)


def test_words_may_change_too() -> None:
    found = course("none until 50 then sign")
    assert (found.at(49), found.at(50)) == ("none", "sign")
    assert (type(course("1 until 5 then 0.5").at(0)), type(course("1 until 5 then 0.5").at(9))) == (int, float)


@pytest.mark.parametrize(
    ("text", "whole"),
    [("10 => 100 over 7", True), ("1 -> 3 over 9", True), ("10.0 -> 100 over 7", False), ("0 -> 1 over 7", False)]
    + [("0.5 -> 3 over 7", False)],
)
def test_whole_numbers_stay_whole_where_they_are_written_so(text: str, whole: bool) -> None:
    found = [course(text).at(number) for number in range(9)]
    assert all(isinstance(value, int) for value in found) is whole


@pytest.mark.parametrize("value", [1, 0.5, True, "int8", "tokens", "over", "a-> b", "0.5 -> 0.9"])
def test_plain_values_are_no_ramps(value: Scalar) -> None:
    assert ramp(value) is None


@given(courses())
def test_values_stay_between_their_ends_and_turn_at_the_knots_only(text: str) -> None:
    found = course(text)
    knots = [0, *found.knots, max(found.knots) + 20]
    assert found.knots == tuple(sorted(found.knots))
    path = values(found, knots[-1] + 1)
    for start, stop in itertools.pairwise(knots):
        piece = path[start : stop + 1]
        assert all(min(piece[0], piece[-1]) <= value <= max(piece[0], piece[-1]) for value in piece), (start, stop)
        assert piece == sorted(piece) or piece == sorted(piece, reverse=True), (start, stop)
    assert len(set(path[max(found.knots) :])) == 1, "after the last knot it rests"


@given(numbers, numbers, st.integers(1, 40), curves)
def test_a_curve_ends_on_its_ends_to_the_bit(first: str, last: str, rounds: int, curve: str) -> None:
    path = values(course(f"{first} {curve} {last} over {rounds}"), rounds + 3)
    assert (path[0], path[-1]) == (float(first), float(last))


def test_the_negative_control_a_knot_left_out_hides_a_turn() -> None:
    """Between rounds 0 and 9 this rises, falls and rises again: without the knots in between both ends say little."""
    found = course("1 until 3 then 9 until 3 then 2")
    path = values(found, 10)
    assert max(path) > max(path[0], path[-1])
    assert max(path) == max(float(found.at(number)) for number in found.knots)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1 until x then 2", "no course of values"),
        ("1 until 5 then 2 3", "no course of values"),
        ("1 over 3", "no course of values"),
        ("a -> b over 3", "no course of values"),
        ("1 -> 2 over -3", "no course of values"),
        ("1 -> 2 over 3.5", "no course of values"),
        ("1 -> 2 over 99999999999", "no course of values"),
        ("1 until 5 then 2 -> 3", "no course of values"),
        ("1..2 -> 3 over 4", "is no number"),
        ("1 -> 1e999 over 4", "too great a number"),
        ("0 => 3 over 4", "takes numbers above zero"),
        ("1 until 9 then -1 => 3 over 4", "takes numbers above zero"),
        ("1 until 2 then " * 30 + "1", f"write it in {MAX_LETTERS}"),
    ],
)
def test_nonsense_is_one_line(text: str, reason: str) -> None:
    with pytest.raises(UnknownOption, match=reason) as caught:
        ramp(text)
    assert "\n" not in str(caught.value)


@given(st.text("0123456789.-+e>=~ auntilovrhn", max_size=40))
def test_no_text_breaks_it(text: str) -> None:
    try:
        found = ramp(text)
    except UnknownOption:
        return
    if found is not None:
        for number in (0, 1, *found.knots, 10**9):
            value = found.at(number)
            assert isinstance(value, str) or math.isfinite(value)


def test_the_words_of_a_course_are_all_that_it_may_be() -> None:
    course = ramp("none until 5 then int8 until 0 then sign")
    assert course is not None and course.words == {"none", "int8", "sign"}

"""Options that change over the rounds."""

import itertools
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optim.compose import compose
from optim.errors import UnknownOption
from optim.options import OptionValue, Scalar
from optim.schedules.option_schedules import MAX_PHASES, OptionSchedule, as_toml, read_option
from tests.optim.fake_peers import constant, curve

NAME = "codec.k"
numbers = st.floats(0.001, 1000) | st.integers(1, 500)
forms = st.sampled_from(["linear", "exponential", "cosine"])
curves = st.builds(curve, numbers, numbers, st.integers(1, 40), forms)


@st.composite
def schedules(draw: st.DrawFn) -> OptionValue:
    """A curve, or up to three phases and then a curve or a number."""
    phases = draw(st.lists(st.builds(constant, numbers, st.integers(1, 30)) | curves, max_size=3))
    return [*phases, draw(curves | numbers)] if phases else draw(curves)


def schedule(value: OptionValue) -> OptionSchedule:
    found = read_option(NAME, value)
    assert isinstance(found, OptionSchedule)
    return found


def values(found: OptionSchedule, rounds: int) -> list[float]:
    return [float(found.at_round(number)) for number in range(rounds)]


@pytest.mark.parametrize(
    ("value", "rounds", "expected"),
    [
        (curve(0.5, 0.9, 4), (0, 1, 2, 4, 99), (0.5, 0.6, 0.7, 0.9, 0.9)),
        ({"start": 0.5, "end": 0.9, "rounds": 4}, (0, 1, 99), (0.5, 0.6, 0.9)),
        (curve(1, 0.1, 4, "cosine"), (0, 2, 4, 99), (1.0, 0.55, 0.1, 0.1)),
        (curve(0.01, 1, 2, "exponential"), (0, 1, 2, 99), (0.01, 0.1, 1.0, 1.0)),
        ([constant(1, 50), 30], (0, 49, 50, 99), (1, 1, 30, 30)),
        ([constant(2, 3), curve(4, 8, 2)], (2, 3, 4, 5, 9), (2, 4, 6, 8, 8)),
        ([constant(1, 2), constant(5, 3), 7], (1, 2, 4, 5), (1, 5, 5, 7)),
        ([curve(2, 8, 3), constant(5, 1), curve(9, 7, 2)], (0, 1, 2, 3, 4, 5, 9), (2, 4, 6, 5, 9, 8, 7)),
        (curve(-1, 1.0, 2), (0, 1, 2), (-1.0, 0.0, 1.0)),
        (curve(1e-3, 2e-3, 1), (0, 1), (0.001, 0.002)),
    ],
)
def test_schedules_by_hand(value: OptionValue, rounds: tuple[int, ...], expected: tuple[float, ...]) -> None:
    assert [schedule(value).at_round(number) for number in rounds] == pytest.approx(expected)


def test_documented_schedules_are_valid() -> None:
    text = (
        (Path(__file__).parents[2] / "docs" / "reference" / "recipes.md").read_text().split("## Options that change")[1]
    )
    written = re.findall(r"^\| `(\w+) = (.+?)` \|", text, re.MULTILINE)
    assert len(written) == 5 and all(schedule(tomllib.loads(f"v = {value}")["v"]) for _, value in written)
    budgets = re.findall(r"`schedule\.inner_steps = (.+?)`", text)
    tables = [{"schedule": {"inner_steps": tomllib.loads(f"v = {budget}")["v"]}} for budget in budgets]
    assert tables and all(len(compose("averaging", table).breakpoints) > 1 for table in tables)


def test_text_values_may_change() -> None:
    found = schedule([constant("none", 50), "sign"])
    assert (found.at_round(49), found.at_round(50)) == ("none", "sign")
    halved = schedule([constant(1, 5), 0.5])
    assert (type(halved.at_round(0)), type(halved.at_round(9))) == (int, float)


@pytest.mark.parametrize(
    ("value", "whole"),
    [(curve(10, 100, 7, "exponential"), True), (curve(1, 3, 9), True), (curve(10.0, 100, 7), False)]
    + [(curve(0, 1, 7), False), (curve(0.5, 3, 7), False)],
)
def test_curve_between_integers_has_integer_values(value: OptionValue, whole: bool) -> None:
    found = [schedule(value).at_round(number) for number in range(9)]
    assert all(isinstance(one, int) for one in found) is whole


@pytest.mark.parametrize("value", [1, 0.5, True, "int8", "tokens", "over"])
def test_plain_values_are_not_schedules(value: Scalar) -> None:
    found = read_option(NAME, value)
    assert found == value and type(found) is type(value)


@given(schedules())
def test_values_stay_between_the_ends_and_turn_only_at_breakpoints(value: OptionValue) -> None:
    found = schedule(value)
    breakpoints = [0, *found.breakpoints, max(found.breakpoints) + 20]
    assert found.breakpoints == tuple(sorted(set(found.breakpoints)))
    path = values(found, breakpoints[-1] + 1)
    for start, stop in itertools.pairwise(breakpoints):
        piece = path[start : stop + 1]
        assert all(min(piece[0], piece[-1]) <= one <= max(piece[0], piece[-1]) for one in piece), (start, stop)
        assert piece == sorted(piece) or piece == sorted(piece, reverse=True), (start, stop)
    assert len(set(path[max(found.breakpoints) :])) == 1, "constant after the last breakpoint"


@given(numbers, numbers, st.integers(1, 40), forms)
def test_curve_reaches_its_ends_to_the_bit(start: float, end: float, rounds: int, form: str) -> None:
    path = values(schedule(curve(start, end, rounds, form)), rounds + 3)
    assert (path[0], path[-1]) == (float(start), float(end))


@given(schedules())
def test_schedule_survives_a_round_trip_through_toml(value: OptionValue) -> None:
    assert schedule(tomllib.loads(f"v = {as_toml(value)}")["v"]) == schedule(value)


def test_negative_control_a_missing_breakpoint_hides_a_turn() -> None:
    """Between rounds 0 and 9 the value rises, falls and rises again, which both ends alone do not show."""
    found = schedule([constant(1, 3), constant(9, 3), 2])
    path = values(found, 10)
    assert max(path) > max(path[0], path[-1])
    assert max(path) == max(float(found.at_round(number)) for number in found.breakpoints)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"start": 1, "end": 2}, "codec.k: rounds is missing; write { start = 10, end = 60, rounds = 30, curve ="),
        ({"start": 1, "end": 2, "runds": 3}, "codec.k: unknown key 'runds'; write { start"),
        ({}, "codec.k: start is missing; write { start"),
        ({"bits": 8, "steps": 500}, "codec.k: unknown key 'bits'; write { start"),
        (curve(1, 2, -3), "codec.k: rounds = -3 must be at least 1; write { start"),
        (curve(1, 2, 0), "codec.k: rounds = 0 must be at least 1"),
        (curve(1, 2, 10**9), "codec.k: rounds = 1000000000 must be at most 999999999"),
        ({"start": 1, "end": 2, "rounds": 3.5}, "codec.k: rounds = 3.5 must be a whole number"),
        ({"start": 1, "end": 2, "rounds": True}, "codec.k: rounds = True must be a whole number"),
        ({"start": "a", "end": 2, "rounds": 3}, "codec.k: start = 'a' must be a number of at most 1e15"),
        ({"start": True, "end": 2, "rounds": 3}, "codec.k: start = True must be a number"),
        (curve(1, 10**16, 3), "codec.k: end = 10000000000000000 must be a number of at most 1e15"),
        (curve(1, math.inf, 3), "codec.k: end = inf must be a number"),
        (curve(1, math.nan, 3), "codec.k: end = nan must be a number"),
        (curve(1, 2, 3, "straight"), "codec.k: curve = 'straight' must be 'linear', 'exponential' or 'cosine'"),
        (curve(0, 3, 4, "exponential"), "codec.k: an exponential curve takes numbers above zero; write { start"),
        ([], "codec.k: a list has 2 to 64 phases; write [{ value = 1, rounds = 50 }, 30], or a single value"),
        ([3], "codec.k: a list has 2 to 64 phases"),
        ([constant(1, 2)] * MAX_PHASES + [3], "codec.k: a list has 2 to 64 phases"),
        ([5, 6], "codec.k, phase 1 = 5: rounds is missing; write { value = 5, rounds = 50 }"),
        ([{"value": 5}, 6], "codec.k, phase 1: rounds is missing; write { value = 5, rounds = 50 }"),
        ([constant(5, 0), 6], "codec.k, phase 1: rounds = 0 must be at least 1; write { value"),
        ([{"value": 5, "rounds": 3, "curve": "cosine"}, 6], "codec.k, phase 1: unknown key 'curve'; write { value"),
        ([constant(5, 3), {"start": 5, "end": 6}], "codec.k, phase 2: rounds is missing; write { start"),
        ([constant(5, 3), constant(6, 3)], "codec.k, phase 2: a value that stays needs no table; write 6 alone"),
        ([constant(1, 9), curve(-1, 3, 4, "exponential")], "codec.k, phase 2: an exponential curve takes numbers"),
        ({"value": 5, "rounds": 3}, "codec.k: a value that stays needs no table; write 5 alone"),
    ],
    ids=str,
)
def test_invalid_table_is_refused_in_one_line_that_names_option_and_key(value: OptionValue, reason: str) -> None:
    with pytest.raises(UnknownOption) as caught:
        read_option(NAME, value)
    assert str(caught.value).startswith(reason) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "example"),
    [
        ("24 => 140 over 66", '{ start = 10, end = 60, rounds = 30, curve = "exponential" }'),
        ("0.5 -> 0.9 over 20", "{ start = 10, end = 60, rounds = 30, "),
        ("1 ~> 0.1", "{ start = 10, end = 60, rounds = 30, "),
        ("1 until 50 then 30", "[{ value = 1, rounds = 50 }, 30]"),
        ("int8 until 50 then topk", "[{ value = 1, rounds = 50 }, 30]"),
    ],
)
def test_old_text_forms_are_refused_with_a_table_to_write_instead(text: str, example: str) -> None:
    with pytest.raises(UnknownOption) as caught:
        read_option(NAME, text)
    told = str(caught.value)
    assert told.startswith(f"codec.k = {text!r}: a value that changes over the rounds is a table; write {example}")
    assert "\n" not in told


keys = st.sampled_from(["start", "end", "rounds", "curve", "value", "bits", "steps"])
anything = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys | st.text(max_size=5), inner, max_size=5),
    max_leaves=12,
)
tables: st.SearchStrategy[Mapping[str, Any]] = st.dictionaries(keys, numbers | forms | anything, max_size=5)


@given(anything | tables | st.lists(tables | anything, max_size=4))
def test_any_value_is_read_or_refused(value: OptionValue) -> None:
    try:
        found = read_option(NAME, value)
    except UnknownOption:
        return
    if isinstance(found, OptionSchedule):
        for number in (0, 1, *found.breakpoints, 10**9):
            found.at_round(number)


def test_constants_are_the_values_of_all_constant_phases() -> None:
    found = schedule([constant("none", 5), constant("int8", 1), "sign"])
    assert found.constants == {"none", "int8", "sign"}

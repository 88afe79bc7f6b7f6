"""The options of a method in a round."""

import dataclasses

import pytest

from optim.codecs.floats import Uncompressed
from optim.codecs.sign import BlockSign
from optim.compose import COMPONENTS, compose
from optim.inner.base import WEIGHTS
from optim.method import AGGREGATION_STATE, REFERENCE_WEIGHT, USUAL_NORM
from optim.outer import Nesterov
from optim.recipes import RECIPES
from tests.optim.fake_peers import constant, curve


def test_method_without_schedules_is_the_same_in_every_round() -> None:
    method = compose("diloco")
    assert method.at_round(0) is method and method.at_round(10**6) is method and method.breakpoints == (0,)


def test_method_with_schedules_has_options_of_its_own_in_each_round() -> None:
    method = compose(
        "diloco",
        {"codec": {"kind": [constant("none", 3), "sign"]}, "update": {"momentum": curve(0.0, 0.8, 4)}},
    )
    assert method.breakpoints == (0, 2, 3, 4)
    assert [type(method.at_round(number).codec) for number in (0, 2, 3, 9)] == [Uncompressed] * 2 + [BlockSign] * 2
    found = [method.at_round(number).update for number in (0, 1, 4, 5)]
    assert [update.momentum for update in found if isinstance(update, Nesterov)] == pytest.approx([0.0, 0.2, 0.8, 0.8])
    assert method.update == method.at_round(0).update, "the method itself has the options of the first round"


@pytest.mark.parametrize("recipe", RECIPES)
def test_slots_are_the_same_in_every_round(recipe: str) -> None:
    method = compose(recipe)
    for number in (0, *method.breakpoints, method.breakpoints[-1] + 7):
        now = method.at_round(number)
        assert now.slots == method.slots and now.signal == method.signal and now.inner == method.inner
        assert now.topology == method.topology and now.adoption == method.adoption
    assert list(method.slots) == sorted(set(method.slots)) and WEIGHTS not in method.slots
    remembered = {AGGREGATION_STATE} if method.aggregate.state_size else set()
    usual = {USUAL_NORM, *([REFERENCE_WEIGHT] if method.update.is_scaled_by_weight else [])}
    assert {*method.update.slots, *method.signal.shared_names[1:], *remembered, *usual} == set(method.slots)


@pytest.mark.parametrize("recipe", RECIPES)
def test_methods_with_equal_options_are_equal(recipe: str) -> None:
    assert compose(recipe) == compose(recipe)
    assert {field.name for field in dataclasses.fields(compose(recipe))} >= set(COMPONENTS)

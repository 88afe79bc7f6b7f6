"""No row of the table goes without the tests that every method must pass."""

from collections.abc import Callable

import pytest

from optim.recipes import RECIPES
from tests.optim import test_exchange, test_recipes

REQUIRED: dict[str, tuple[Callable[..., None], ...]] = {
    "a state that was saved goes on to the same bits": (test_exchange.test_state_survives_a_restart,),
    "the order of arrival is no matter": (
        test_exchange.test_messages_arrive_in_any_order_and_are_merged_in_the_agreed_one,
    ),
    "who weighs nothing is absent": (test_exchange.test_who_weighs_nothing_is_absent,),
    "equal messages keep replicas equal over 20 rounds": (
        test_exchange.test_replicas_that_see_the_same_messages_stay_equal,
    ),
    "what missed its round is not lost": (
        test_exchange.test_an_excluded_message_is_sent_again,
        test_exchange.test_taking_back_undoes_a_message_of_progress_and_no_other,
    ),
}


def parametrised_recipes(test: Callable[..., None]) -> set[str]:
    """The recipes that a test is parametrised with."""
    found: set[str] = set()
    for mark in getattr(test, "pytestmark", []):
        names, values = mark.args
        if "recipe" in (names if isinstance(names, tuple) else (names,)):
            found |= {value if isinstance(value, str) else value[0] for value in values}
    return found


@pytest.mark.parametrize("promise", REQUIRED)
def test_every_recipe_is_tested_for(promise: str) -> None:
    covered = set[str]().union(*(parametrised_recipes(test) for test in REQUIRED[promise]))
    assert set(RECIPES) <= covered, f"without such a test: {sorted(set(RECIPES) - covered)}"


def test_negative_control_a_test_of_some_recipes_is_told_from_one_of_all() -> None:
    some = parametrised_recipes(test_recipes.test_replicators_send_the_same_places_of_all_members)
    assert some == {"detonation-random", "detonation-striding"}
    assert parametrised_recipes(test_recipes.test_full_replication_leaves_no_momentum_behind) == set()

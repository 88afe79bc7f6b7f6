"""Every recipe is in the tests that every method must pass."""

from collections.abc import Callable

import pytest

from optim.recipes import RECIPES
from tests.optim import test_exchange, test_recipes

REQUIRED: dict[str, tuple[Callable[..., None], ...]] = {
    "a restored state continues to the same bits": (test_exchange.test_state_survives_a_restart,),
    "the order of arrival does not matter": (
        test_exchange.test_contributions_that_arrive_in_any_order_are_merged_in_the_agreed_one,
    ),
    "a member of weight zero is absent": (test_exchange.test_member_of_weight_zero_is_absent,),
    "replicas stay equal over 20 rounds": (test_exchange.test_replicas_stay_equal_over_twenty_rounds,),
    "a contribution that missed its round is not lost": (
        test_exchange.test_excluded_contribution_is_sent_again,
        test_exchange.test_restoring_undoes_a_contribution_of_progress_only,
    ),
}


def parametrised_recipes(test: Callable[..., None]) -> set[str]:
    """Return the recipes that a test is parametrised with."""
    found: set[str] = set()
    for mark in getattr(test, "pytestmark", []):
        names, values = mark.args
        if "recipe" in (names if isinstance(names, tuple) else (names,)):
            found |= {value if isinstance(value, str) else value[0] for value in values}
    return found


@pytest.mark.parametrize("property_name", REQUIRED)
def test_every_recipe_is_tested_for_every_property(property_name: str) -> None:
    covered = set[str]().union(*(parametrised_recipes(test) for test in REQUIRED[property_name]))
    assert set(RECIPES) <= covered, f"without such a test: {sorted(set(RECIPES) - covered)}"


def test_negative_control_a_test_of_some_recipes_is_not_one_of_all() -> None:
    some = parametrised_recipes(test_recipes.test_detonation_members_send_the_same_positions)
    assert some == {"detonation-random", "detonation-striding"}
    assert parametrised_recipes(test_recipes.test_detonation_full_leaves_no_residual) == set()

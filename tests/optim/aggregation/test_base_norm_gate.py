"""The norm gate: one message, however large, moves the model by no more than an honest one."""

import numpy as np
import pytest
import torch

from optim.aggregation.base import limit_scale, update_usual_norm
from optim.errors import OptimError
from optim.exchange import Aggregator
from optim.method import USUAL_NORM
from tests.optim.fake_peers import LOSSLESS, NUMEL, FakePeer, Tables, make_planner, new_slots, random_values

WIDE_OPEN: Tables = {"aggregate": {"gate": 1e6}}
RECIPES = ("diloco", "averaging", "sparseloco", "edit", "dilocox", "frugal")


def moved_by_last_round(recipe: str, rounds: list[list[float]], tables: Tables = {}) -> float:  # noqa: B006
    """Return how far the anchor moves in the last round; a round is the scale of each member's contribution."""
    replica = FakePeer(make_planner(recipe, tables))
    before = replica.anchor
    for number, scales in enumerate(rounds):
        before = replica.anchor.clone()
        numel = replica.planner.signal_numel
        values = [scale * random_values(100 * number + i, numel) for i, scale in enumerate(scales)]
        sent = [replica.encoder.encode(number, row, torch.zeros_like(row)) for row in values]
        replica.apply(number, sent, [1.0] * len(sent))
    return float(torch.linalg.vector_norm(replica.anchor - before))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("liar", [1e3, 1e9])
def test_one_large_message_moves_the_model_no_farther_than_an_honest_one(recipe: str, liar: float) -> None:
    honest = [[1.0] * 5] * 3
    usual = moved_by_last_round(recipe, [*honest, [1.0] * 5])
    attacked = moved_by_last_round(recipe, [*honest, [1.0, 1.0, liar, 1.0, 1.0]])
    assert attacked < 1.3 * usual


def test_without_the_gate_it_moves_it_by_its_own_size() -> None:
    """The control."""
    honest = [[1.0] * 5] * 3
    usual = moved_by_last_round("diloco", [*honest, [1.0] * 5])
    assert moved_by_last_round("diloco", [*honest, [1.0, 1.0, 1e3, 1.0, 1.0]], WIDE_OPEN) > 50 * usual


@pytest.mark.parametrize("recipe", ["diloco", "sparseloco", "edit"])
def test_liar_that_is_alone_in_a_round_is_scaled_down(recipe: str) -> None:
    usual = moved_by_last_round(recipe, [[1.0]] * 4)
    assert moved_by_last_round(recipe, [[1.0]] * 3 + [[1e9]]) < 1.5 * usual


@pytest.mark.parametrize("recipe", ["averaging", "sparseloco"])
def test_first_round_of_a_liar_alone_moves_nothing_if_it_is_absurd(recipe: str) -> None:
    assert moved_by_last_round(recipe, [[1e8]]) == 0
    assert moved_by_last_round(recipe, [[1.0]]) > 0


def test_usual_norm_follows_a_jump_that_all_make_within_a_few_rounds() -> None:
    usual, steps = update_usual_norm([1.0, 1.1, 0.9], 0.0), 0
    while usual < 50:
        usual, steps = update_usual_norm([100.0, 90.0, 110.0], usual), steps + 1
    assert steps == 6
    assert update_usual_norm([1e-9] * 5, 1.0) == pytest.approx(7 / 8)
    assert update_usual_norm([0.0, 0.0], 1.0) == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_minority_of_liars_does_not_raise_the_usual_norm_above_the_honest_ones(seed: int) -> None:
    values = np.random.default_rng(seed)
    usual = 0.0
    for _ in range(20):
        honest = values.uniform(0.5, 1.5, 6)
        usual = update_usual_norm([*honest, *values.uniform(0, 1e9, 4)], usual)
        assert 0 < usual <= 1.5


def test_scale_brings_a_norm_above_the_limit_down_to_the_usual_one() -> None:
    assert limit_scale(100.0, 2.0, 20.0) == pytest.approx(0.02)
    assert limit_scale(20.0, 2.0, 20.0) == 1.0
    assert limit_scale(1e9, 0.0, 1e3) == 0.0


def test_refused_members_are_named_and_the_slot_is_that_of_the_round_kind() -> None:
    planner = make_planner("averaging", {**LOSSLESS, "topology": {"kind": "gather"}})
    slots, codec = new_slots(), planner.plan(0).codecs[0]
    payloads = [codec.encode(scale * random_values(i)) for i, scale in enumerate([1.0, 1.0, 50.0])]
    merged = Aggregator(planner).merge(0, payloads, [1.0] * 3, slots)
    assert merged.left_out == {2: "too large"}
    expected = (random_values(0) + random_values(1)) / 2
    assert torch.allclose(torch.from_numpy(merged.vector.to_dense()), expected, atol=1e-6)
    assert float(slots[USUAL_NORM][0]) == pytest.approx(1e-3 * NUMEL**0.5, rel=0.1)


def test_streaming_rounds_have_a_usual_norm_for_each_fragment() -> None:
    replica = FakePeer(make_planner("streaming-diloco"))
    assert replica.slots[USUAL_NORM].numel() == 4
    for number in range(4):
        sent = [replica.encode(number, i) for i in range(3)]
        replica.apply(number, sent, [1.0] * 3)
        assert (replica.slots[USUAL_NORM] > 0).sum() == number + 1


def test_nobody_with_a_weight_is_an_error() -> None:
    planner = make_planner("averaging", {"topology": {"kind": "gather"}})
    payload = planner.plan(0).codecs[0].encode(random_values(0))
    with pytest.raises(OptimError, match="above zero"):
        Aggregator(planner).merge(0, [payload], [0.0], new_slots())

import itertools
import random
import statistics

import pytest
import torch

from optim.aggregation.step_scaling import compute_step_scale, update_reference_weight
from optim.compose import compose
from optim.kernels.vectors import ArrayVector
from optim.layout import Layout
from optim.method import REFERENCE_WEIGHT
from optim.recipes import OptionTables
from optim.round_plan import RoundPlanner

START = torch.zeros(1)


def step_scales(rounds: list[list[float]]) -> list[float]:
    """Return the step scale of one round after the other, from the beginning of a run."""
    reference, found = START, []
    for weights in rounds:
        reference = update_reference_weight(weights, reference)
        found.append(compute_step_scale(weights, reference))
    return found


def test_round_of_less_weight_moves_in_proportion_to_it() -> None:
    assert step_scales([[8.0], [8.0], [2.0, 2.0]]) == pytest.approx([1, 1, 4 / 7.875])


def test_round_of_more_weight_than_usual_takes_a_whole_step() -> None:
    assert step_scales([[1.0], [1.0] * 8, [1.0] * 8]) == [1.0, 1.0, 1.0]


def test_reference_weight_stays_near_the_largest_rounds() -> None:
    """With five of eight peers present on average, rounds of seven or eight are seldom scaled down."""
    draw = random.Random(4)
    present = [sum(draw.random() < 5 / 8 for _ in range(8)) or 1 for _ in range(400)]
    found = list(zip(present, step_scales([[512.0] * count for count in present]), strict=True))[50:]
    by_count = {count: statistics.fmean(share for seen, share in found if seen == count) for count in (2, 4, 7)}
    assert by_count[2] == pytest.approx(2 / 7, abs=0.04)
    assert by_count[4] == pytest.approx(4 / 7, abs=0.06)
    assert by_count[7] > 0.95


def test_remaining_half_of_the_peers_takes_whole_steps_after_45_rounds() -> None:
    after = step_scales([[1.0] * 8] + [[1.0] * 4] * 60)
    assert after[1] == pytest.approx(0.5, abs=0.01) and after.index(1.0, 1) == 45
    assert all(late >= early for early, late in itertools.pairwise(after[1:]))


def test_false_claim_of_tokens_shortens_later_steps_by_a_fifth_at_most() -> None:
    honest = [1.0] * 4
    found = step_scales([honest, honest, [*honest, 1e9], honest, honest])
    assert found[3] == pytest.approx(0.8, abs=0.02) and found[4] > found[3]


def test_reference_weight_has_the_same_bits_in_any_order_of_summing() -> None:
    weights = [0.1 * number for number in range(1, 9)]
    forth, back = (update_reference_weight(order, torch.tensor([11.3])) for order in (weights, weights[::-1]))
    assert torch.equal(forth, back) and forth.dtype == torch.float32 and forth != torch.tensor([11.3])
    assert compute_step_scale(weights, forth) == compute_step_scale(weights[::-1], forth) < 1


SIZES = {"whole": Layout(((300,),)), "by fragments": Layout(((100,),) * 3)}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("update", [{"kind": "nesterov"}, {"kind": "sgd"}, {"kind": "heavy-ball"}], ids=str)
def test_round_of_less_weight_moves_anchor_and_momentum_less(sizes: str, update: dict[str, str]) -> None:
    """Steps from the same state by the same mean, of four members and of one; without scaling both are as long."""
    layout = SIZES[sizes]
    fragments: OptionTables = {"schedule": {"inner_steps": 30, "fragments": len(layout.shapes)}}
    for shorten, expected in ((True, 0.25), (False, 1.0)):
        planner = RoundPlanner(compose("averaging", {**fragments, "update": {**update, "shorten": shorten}}), layout, 1)
        plan, distances = planner.plan(0), []
        for members in (4, 1):
            slots = {name: torch.zeros(planner.method.slot_numel(name, 300)) for name in planner.method.slots}
            if shorten:
                slots[REFERENCE_WEIGHT] = torch.tensor([4.0])
            delta = ArrayVector(torch.ones(plan.numel).numpy())
            anchor, after = planner.apply_outer_step(plan, torch.zeros(300), slots, delta, 1.0, [1.0] * members)
            distances.append(
                [anchor.norm().item(), *(after[name].norm().item() for name in planner.method.update.slots)]
            )
            assert set(after) == set(planner.method.slots)
            assert not shorten or not slots[REFERENCE_WEIGHT].sub(4).any(), "the state before the step is not changed"
        shorter = [few / many for many, few in zip(*distances, strict=True)]
        assert shorter == pytest.approx([expected] * len(shorter), rel=0.02)

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


def shares(rounds: list[list[float]]) -> list[float]:
    """One round after the other, from the beginning of a run."""
    usual, found = START, []
    for weights in rounds:
        usual = update_reference_weight(weights, usual)
        found.append(compute_step_scale(weights, usual))
    return found


def test_a_round_moves_by_its_share_of_the_usual_one() -> None:
    assert shares([[8.0], [8.0], [2.0, 2.0]]) == pytest.approx([1, 1, 4 / 7.875])


def test_more_than_usual_is_a_whole_step() -> None:
    assert shares([[1.0], [1.0] * 8, [1.0] * 8]) == [1.0, 1.0, 1.0]


def test_what_is_usual_stays_near_the_great_rounds() -> None:
    """Five of eight peers on average, drawn anew in each round: seldom is one of seven or eight held for small."""
    draw = random.Random(4)
    present = [sum(draw.random() < 5 / 8 for _ in range(8)) or 1 for _ in range(400)]
    found = list(zip(present, shares([[512.0] * count for count in present]), strict=True))[50:]
    by_count = {count: statistics.fmean(share for seen, share in found if seen == count) for count in (2, 4, 7)}
    assert by_count[2] == pytest.approx(2 / 7, abs=0.04)
    assert by_count[4] == pytest.approx(4 / 7, abs=0.06)
    assert by_count[7] > 0.95


def test_who_is_left_takes_whole_steps_again() -> None:
    after = shares([[1.0] * 8] + [[1.0] * 4] * 60)
    assert after[1] == pytest.approx(0.5, abs=0.01) and after.index(1.0, 1) == 45
    assert all(late >= early for early, late in itertools.pairwise(after[1:]))


def test_a_lie_about_tokens_shortens_what_follows_by_a_fifth_at_most() -> None:
    honest = [1.0] * 4
    found = shares([honest, honest, [*honest, 1e9], honest, honest])
    assert found[3] == pytest.approx(0.8, abs=0.02) and found[4] > found[3]


def test_the_same_bits_whatever_the_order_in_which_it_is_summed() -> None:
    weights = [0.1 * number for number in range(1, 9)]
    forth, back = (update_reference_weight(order, torch.tensor([11.3])) for order in (weights, weights[::-1]))
    assert torch.equal(forth, back) and forth.dtype == torch.float32 and forth != torch.tensor([11.3])
    assert compute_step_scale(weights, forth) == compute_step_scale(weights[::-1], forth) < 1


SIZES = {"whole": Layout(((300,),)), "by fragments": Layout(((100,),) * 3)}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("update", [{"kind": "nesterov"}, {"kind": "sgd"}, {"kind": "heavy-ball"}], ids=str)
def test_a_small_round_moves_the_anchor_and_its_momentum_less(sizes: str, update: dict[str, str]) -> None:
    """From the same state by the same mean: of four members, and of one. Undefended, both go as far."""
    layout = SIZES[sizes]
    fragments: OptionTables = {"schedule": {"inner_steps": 30, "fragments": len(layout.shapes)}}
    for shorten, expected in ((True, 0.25), (False, 1.0)):
        program = RoundPlanner(compose("averaging", {**fragments, "update": {**update, "shorten": shorten}}), layout, 1)
        plan, ways = program.plan(0), []
        for members in (4, 1):
            slots = {name: torch.zeros(program.method.slot_numel(name, 300)) for name in program.method.slots}
            if shorten:
                slots[REFERENCE_WEIGHT] = torch.tensor([4.0])
            delta = ArrayVector(torch.ones(plan.numel).numpy())
            anchor, after = program.apply_outer_step(plan, torch.zeros(300), slots, delta, 1.0, [1.0] * members)
            ways.append([anchor.norm().item(), *(after[name].norm().item() for name in program.method.update.slots)])
            assert set(after) == set(program.method.slots)
            assert not shorten or not slots[REFERENCE_WEIGHT].sub(4).any(), "what was before stays as it was"
        shorter = [few / many for many, few in zip(*ways, strict=True)]
        assert shorter == pytest.approx([expected] * len(shorter), rel=0.02)

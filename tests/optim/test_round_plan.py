"""The plan of each round, for every recipe, and the outer steps of the planner."""

import itertools
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic.dataclasses import dataclass

from optim.aggregation.edit_penalty import MAX_BLOCKS
from optim.codecs.base import Codec
from optim.codecs.low_rank import LowRank
from optim.compose import CODECS, OUTER_OPTIMIZERS, compose
from optim.errors import UnknownOption
from optim.kernels.vectors import SLAB_SIZE
from optim.layout import Layout
from optim.options import STRICT
from optim.outer import Adam, Gossip, OuterOptimizer, OuterStep, Sgd
from optim.recipes import RECIPES
from optim.round_plan import RoundPlanner, split_into_parts
from optim.signals import PseudoGradient, PseudoGradientAndAnchor
from tests.optim.fake_peers import (
    LAYOUT,
    LOSSLESS,
    NO_PROGRESS,
    NUMEL,
    PART_COUNT,
    Tables,
    as_vector,
    constant,
    curve,
    make_planner,
    random_values,
    sent_mask,
)

each_recipe = pytest.mark.parametrize("recipe", RECIPES)
FRAGMENTS: Tables = {"schedule": {"inner_steps": 30, "fragments": 3}}


def last_round(planner: RoundPlanner) -> int:
    """Return a round after which everything repeats."""
    return min(2000, planner.method.breakpoints[-1] + 2 * len(planner.cycle))


@pytest.mark.parametrize(("numel", "parts", "alignment"), [(1, 1, 1), (10, 3, 1), (9000, 12, 256), (4097, 3, 4096)])
def test_parts_cover_the_vector_and_start_at_aligned_blocks(numel: int, parts: int, alignment: int) -> None:
    bounds = split_into_parts(numel, parts, alignment)
    assert bounds[0][0] == 0 and bounds[-1][1] == numel
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
    assert all(start % alignment == 0 and start < stop for start, stop in bounds)
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 2 * alignment
    assert len(bounds) == min(parts, -(-numel // alignment))


def test_empty_vectors_and_zero_parts_are_refused() -> None:
    for numel, parts in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least one"):
            split_into_parts(numel, parts, 1)


@each_recipe
def test_parts_of_a_plan_cover_the_contribution_without_gaps(recipe: str) -> None:
    planner = make_planner(recipe)
    for round_number in planner.representative_rounds():
        plan = planner.plan(round_number)
        assert plan.round == round_number and plan.numel == int(sent_mask(planner, round_number).sum())
        assert plan.part_spans[0][0] == 0 and plan.part_spans[-1][1] == plan.numel
        assert all(before[1] == after[0] for before, after in itertools.pairwise(plan.part_spans))
        assert (
            len(plan.codecs) == len(plan.part_spans) <= (PART_COUNT if plan.method.topology.kind == "butterfly" else 1)
        )
        assert plan.steps >= 1
        assert planner.plan(round_number) is plan


@each_recipe
def test_every_value_is_sent_within_a_cycle(recipe: str) -> None:
    planner = make_planner(recipe)
    total = sum((sent_mask(planner, round_number) for round_number in planner.cycle), torch.zeros(planner.signal_numel))
    assert total.ge(1).all()
    fragments = planner.method.schedule.fragments
    if not planner.method.signal.averaged_names:
        assert total.eq(len(planner.cycle) // fragments).all(), "each equally often"
    again = planner.plan(len(planner.cycle))
    assert again.spans == planner.plan(0).spans


@each_recipe
def test_scatter_inverts_gather_and_touches_only_sent_values(recipe: str) -> None:
    method = compose(recipe)
    planner = make_planner(recipe, None if method.signal.requires_whole or method.aggregate.state_size else FRAGMENTS)
    for round_number in planner.cycle:
        plan, vector, other = (
            planner.plan(round_number),
            random_values(1, planner.signal_numel),
            random_values(2, planner.signal_numel),
        )
        before, mask = other.clone(), sent_mask(planner, round_number).bool()
        plan.scatter(plan.gather(vector), other)
        assert torch.equal(other[mask], vector[mask]) and torch.equal(other[~mask], before[~mask])
        gathered = plan.gather(other)
        gathered += 1.0
        plan.scatter(gathered, other)
        assert torch.equal(other[mask], vector[mask] + 1.0), (
            "scattered values are written back from a view and from a copy"
        )


@each_recipe
def test_no_contribution_exceeds_the_maximum_sizes(recipe: str) -> None:
    planner = make_planner(recipe)
    for round_number in range(last_round(planner)):
        sizes = planner.plan(round_number).max_sizes
        assert max(sizes) <= planner.max_part_bytes and sum(sizes) <= planner.max_contribution_bytes
        assert len(sizes) <= planner.max_parts


@st.composite
def changing_codecs(draw: st.DrawFn) -> Tables:
    """Draw two schedules of the codec at once, over a contribution in fragments."""
    turn, rounds = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    first, last = draw(st.integers(8, 400)), draw(st.integers(8, 400))
    other = draw(st.sampled_from([kind for kind in CODECS if kind != "topk" and CODECS[kind].is_contractive]))
    kinds = [other, "topk"] if draw(st.booleans()) else ["topk", other]
    return {
        "schedule": {"inner_steps": 30, "fragments": draw(st.integers(1, 4))},
        "codec": {"kind": [constant(kinds[0], turn), kinds[1]], "k": curve(first, last, rounds)},
        "topology": {"kind": "gather"},
    }


@settings(deadline=None, max_examples=40)
@given(changing_codecs())
def test_largest_contribution_of_changing_options_is_known_at_the_start(tables: Tables) -> None:
    planner = make_planner("diloco", tables)
    longest = max(sum(planner.plan(round_number).max_sizes) for round_number in range(40))
    assert longest <= planner.max_contribution_bytes


def test_negative_control_rounds_after_breakpoints_miss_the_largest() -> None:
    """k grows until the kind changes: the longest fragment has its largest k a few rounds before that breakpoint."""
    tables: Tables = {
        "schedule": {"inner_steps": 30, "fragments": 4, "pattern": "contiguous"},
        "codec": {"kind": [constant("topk", 11), "sign"], "k": curve(8, 4000, 20)},
        "topology": {"kind": "gather"},
    }
    planner = make_planner("diloco", tables)
    longest = max(sum(planner.plan(round_number).max_sizes) for round_number in range(40))
    from_each_on = {round_number + more for round_number in planner.method.breakpoints for more in planner.cycle}
    assert (
        max(sum(planner.plan(round_number).max_sizes) for round_number in from_each_on)
        < longest
        == planner.max_contribution_bytes
    )


@each_recipe
def test_steps_before_a_round_sum_all_earlier_rounds(recipe: str) -> None:
    planner, steps = make_planner(recipe), 0
    for round_number in range(last_round(planner)):
        assert planner.steps_before(round_number) == steps
        steps += planner.plan(round_number).steps
    assert planner.steps_before(3) == sum(planner.plan(round_number).steps for round_number in range(3)), (
        "in any order of asking"
    )


def test_growing_inner_steps_are_summed_round_by_round() -> None:
    planner = make_planner("averaging", {"schedule": {"inner_steps": curve(10, 30, 4)}})
    assert [planner.steps_before(round_number) for round_number in (6, 1, 5, 0)] == [130, 10, 100, 0]
    assert planner.plan(9).steps == 30


@each_recipe
def test_contribution_may_join_rounds_with_the_same_values_and_codec(recipe: str) -> None:
    planner = make_planner(recipe)
    for round_number in planner.cycle:
        plan = planner.plan(round_number)
        assert plan.is_compatible_with(plan)
        for later in range(round_number + 1, round_number + 4):
            other = planner.plan(later)
            same = (plan.spans, plan.part_spans, plan.codecs) == (other.spans, other.part_spans, other.codecs)
            by_round = any(codec.depends_on_round for codec in plan.codecs)
            assert plan.is_compatible_with(other) is (plan.method.signal.is_delta and same and not by_round)


def test_contribution_with_another_meaning_may_not_join() -> None:
    fragments = make_planner("averaging", FRAGMENTS)
    assert [fragments.plan(0).is_compatible_with(fragments.plan(round_number)) for round_number in range(1, 4)] == [
        False,
        False,
        True,
    ]
    growing = make_planner("sparseloco", {"codec": {"k": [constant(64, 2), 128]}})
    assert growing.plan(0).is_compatible_with(growing.plan(1)) and not growing.plan(1).is_compatible_with(
        growing.plan(2)
    )
    absolute = make_planner("averaging", NO_PROGRESS | {"signal": {"kind": "weights"}, "update": {"kind": "replace"}})
    assert not absolute.plan(0).is_compatible_with(absolute.plan(1))
    shared = make_planner("sparseloco", {"codec": {"kind": "subset"}})
    payload = shared.plan(0).codecs[0].encode(random_values(1))
    as_made, elsewhere = (shared.plan(round_number).codecs[0].decode(payload, NUMEL) for round_number in (0, 1))
    assert not torch.equal(as_made, elsewhere), "the same bytes decode to other values in the next round"
    assert not shared.plan(0).is_compatible_with(shared.plan(1))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RecordingOptimizer(OuterOptimizer):
    """Records its calls, and moves as plain averaging does."""

    kind: ClassVar[str] = "recording"
    slots: ClassVar[tuple[str, ...]] = ("momentum",)
    seen: ClassVar[list[tuple[int, OuterStep]]] = []

    def apply(  # type: ignore[override]
        self, anchor: torch.Tensor, slots: dict[str, torch.Tensor], delta: torch.Tensor, outer_step: OuterStep
    ) -> None:
        self.seen.append((delta.numel(), outer_step))
        anchor -= delta
        slots["momentum"] += delta


def test_fragment_moves_only_its_own_values() -> None:
    RecordingOptimizer.seen.clear()
    planner = make_planner(replace(compose("averaging", FRAGMENTS), update=RecordingOptimizer()))
    anchor, slots = torch.zeros(NUMEL), {"momentum": torch.zeros(NUMEL)}
    for round_number in range(6):
        plan, delta = planner.plan(round_number), random_values(round_number)
        before, mask = anchor, sent_mask(planner, round_number).bool()
        anchor, slots = planner.apply_outer_step(plan, anchor, slots, as_vector(plan.gather(delta)), 0.5, [1.0])
        assert torch.equal(anchor[mask], before[mask] - delta[mask]) and torch.equal(anchor[~mask], before[~mask])
    assert torch.equal(slots["momentum"], -anchor)
    assert [outer_step.count for _, outer_step in RecordingOptimizer.seen] == [0, 0, 0, 1, 1, 1], (
        "the count is of updates of these values, not of rounds"
    )
    assert [outer_step.local_steps for _, outer_step in RecordingOptimizer.seen] == [0, 10, 20, 30, 40, 50]
    assert sum(size for size, _ in RecordingOptimizer.seen) == 2 * NUMEL
    for round_number, (_, outer_step) in enumerate(RecordingOptimizer.seen):
        section = LAYOUT.select(planner.plan(round_number).spans)
        assert outer_step.matrix_spans == section.matrix_spans and outer_step.rate_decay == 0.5


def test_averaged_vectors_move_by_the_whole_mean_in_their_rounds() -> None:
    signal: Tables = {"signal": {"kind": "inner-state", "first_every": 2, "second_every": 2}}
    planner = make_planner("averaging", LOSSLESS | NO_PROGRESS | signal)
    anchor, slots = torch.zeros(NUMEL), {name: torch.ones(NUMEL) for name in planner.method.slots}
    whole = random_values(1, 3 * NUMEL)
    anchor, slots = planner.apply_outer_step(
        planner.plan(0), anchor, slots, as_vector(planner.plan(0).gather(whole)), 1.0, [1.0]
    )
    assert torch.equal(anchor, -whole[:NUMEL]) and slots["first_moment"].eq(1).all()
    anchor, slots = planner.apply_outer_step(
        planner.plan(1), anchor, slots, as_vector(planner.plan(1).gather(whole)), 1.0, [1.0]
    )
    assert torch.equal(slots["first_moment"], 1 - whole[NUMEL : 2 * NUMEL])
    assert torch.equal(slots["second_moment"], 1 - whole[2 * NUMEL :])
    assert torch.equal(anchor, -2 * whole[:NUMEL])


def test_both_vectors_of_a_contribution_reach_the_outer_optimizer() -> None:
    """NoLoCo with alpha .5, beta = gamma = .7, phi (0, 2), theta (1, 2)."""
    ends = []
    for own, phi in ((0, 0.0), (1, 2.0)):
        anchor, slots = torch.tensor([phi]), {"momentum": torch.zeros(1)}
        merged = torch.tensor([(-1.0 + 0.0) / 2, (0.0 + 2.0) / 2])  # mean of phi - theta, mean of phi
        Gossip(alpha=0.5, beta=0.7, gamma=0.7).apply(anchor, slots, merged, OuterStep())
        ends.append((own, float(slots["momentum"]), float(anchor)))
    assert [(d, phi) for _, d, phi in ends] == [pytest.approx((1.05, 1.05)), pytest.approx((-0.35, 1.65))]


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ({"signal": {"kind": "gradient"}}, "sends 'gradient_sum', which inner 'adamw' does not keep"),
        (
            {"signal": {"kind": "inner-state"}, "inner": {"kind": "gathering"}},
            "'first_moment', which inner 'gathering'",
        ),
        ({"schedule": {"fragments": [constant(1, 5), 2]}}, "must not change over the rounds"),
        ({"schedule": {"fragments": 2, "pattern": [constant("strided", 3), "contiguous"]}}, "must not change"),
        ({"schedule": {"experts_every": [constant(1, 5), 2]}}, r"^schedule\.experts_every must not change"),
        ({"schedule": {"experts_every": 2}, "update": {"kind": "adam"}}, r"^schedule\.experts_every: .* counts its"),
    ],
    ids=str,
)
def test_incompatible_components_are_refused_at_the_start(tables: Tables, reason: str) -> None:
    with pytest.raises(UnknownOption, match=reason) as caught:
        make_planner("averaging", NO_PROGRESS | tables)
    assert "\n" not in str(caught.value)


def test_codecs_are_bound_to_their_tensors_and_the_round() -> None:
    gather: Tables = {"topology": {"kind": "gather"}}
    planner = make_planner(replace(compose("averaging", FRAGMENTS | gather), codec=LowRank(rank=2)))
    for round_number in range(4):
        plan = planner.plan(round_number)
        codec: Codec = plan.codecs[0]
        assert codec.binding is not None and codec.binding.round_number == round_number
        assert codec.binding.layout == LAYOUT.select(plan.spans)
        assert codec.bound_layout(plan.numel) == codec.binding.layout
    butterfly = make_planner(replace(compose("averaging"), codec=LowRank(rank=2))).plan(2)
    layouts = [
        codec.bound_layout(stop - start)
        for codec, (start, stop) in zip(butterfly.codecs, butterfly.part_spans, strict=True)
    ]
    assert all(layout is not None and len(layout.shapes) == 1 for layout in layouts), "parts are cut across tensors"


def test_running_statistics_refuse_too_many_blocks() -> None:
    blocks = Layout(((2,),) * (MAX_BLOCKS + 1), tuple(range(MAX_BLOCKS + 1)))
    with pytest.raises(UnknownOption, match="blocks"):
        RoundPlanner(compose("edit"), blocks, 1)
    RoundPlanner(compose("edit", {"aggregate": {"statistics": "round"}}), blocks, 1)


def test_statistics_option_must_not_change_over_the_rounds() -> None:
    with pytest.raises(UnknownOption, match="must not change"):
        make_planner("edit", {"aggregate": {"statistics": [constant("round", 5), "running"]}})


def step_in_slabs_and_at_once(update: OuterOptimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the anchor and slots after a whole round: moved by the planner, and by the optimizer all at once."""
    signal = PseudoGradientAndAnchor() if "progress-and-anchor" in update.signals else PseudoGradient()
    method = replace(compose("averaging"), update=update, signal=signal)
    numel = SLAB_SIZE + 1000
    planner = RoundPlanner(method, Layout(((numel,),)), PART_COUNT)
    delta = random_values(1, numel * signal.vector_count).abs_()
    start, *slots = [random_values(seed, numel).abs_() for seed in (0, *range(2, 2 + len(update.slots)))]
    held = dict(zip(update.slots, slots, strict=True))
    kept = [start.clone(), *(slot.clone() for slot in slots)]
    anchor, after = planner.apply_outer_step(planner.plan(3), start, held, as_vector(delta), 0.5, [1.0])
    assert all(map(torch.equal, [start, *slots], kept)), "the state before the step is not changed"
    update.apply(start, held, delta, planner.outer_step(3, 0.5))
    return [anchor, *after.values()], [start, *held.values()]


@pytest.mark.parametrize("update", [kind() for kind in OUTER_OPTIMIZERS.values()], ids=str)
def test_planner_steps_every_outer_optimizer_as_the_optimizer_steps_itself(update: OuterOptimizer) -> None:
    """The planner has shortcuts for linear and elementwise steps; an optimizer that has neither must not get one."""
    for moved, applied in zip(*step_in_slabs_and_at_once(update), strict=True):
        assert torch.equal(moved, applied)


def test_linear_optimizer_steps_by_its_rate() -> None:
    """A rate other than 1 is rounded into each step first."""
    for rate in (1.0, 0.65):
        moved, applied = step_in_slabs_and_at_once(Sgd(learning_rate=rate))
        assert torch.equal(moved[0], applied[0])
    assert not torch.equal(moved[0], step_in_slabs_and_at_once(Sgd())[0][0]), "the control"


def test_optimizer_that_uses_a_norm_steps_the_whole_vector_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(map(torch.equal, *step_in_slabs_and_at_once(Adam(clip=0.1))))
    monkeypatch.setattr(Adam, "is_elementwise", True)
    assert not all(map(torch.equal, *step_in_slabs_and_at_once(Adam(clip=0.1)))), "the control"

"""What each round of a method exchanges, for every row of the table."""

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


def last_round(program: RoundPlanner) -> int:
    """After which everything repeats."""
    return min(2000, program.method.breakpoints[-1] + 2 * len(program.cycle))


@pytest.mark.parametrize(("numel", "parts", "alignment"), [(1, 1, 1), (10, 3, 1), (9000, 12, 256), (4097, 3, 4096)])
def test_parts_cover_the_vector_and_start_at_blocks(numel: int, parts: int, alignment: int) -> None:
    bounds = split_into_parts(numel, parts, alignment)
    assert bounds[0][0] == 0 and bounds[-1][1] == numel
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
    assert all(start % alignment == 0 and start < stop for start, stop in bounds)
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 2 * alignment
    assert len(bounds) == min(parts, -(-numel // alignment))


def test_parts_of_nothing_are_refused() -> None:
    for numel, parts in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least one"):
            split_into_parts(numel, parts, 1)


@each_recipe
def test_a_plan_lays_its_message_out_without_a_gap(recipe: str) -> None:
    program = make_planner(recipe)
    for number in program.representative_rounds():
        plan = program.plan(number)
        assert plan.round == number and plan.numel == int(sent_mask(program, number).sum())
        assert plan.part_spans[0][0] == 0 and plan.part_spans[-1][1] == plan.numel
        assert all(before[1] == after[0] for before, after in itertools.pairwise(plan.part_spans))
        assert (
            len(plan.codecs) == len(plan.part_spans) <= (PART_COUNT if plan.method.topology.kind == "butterfly" else 1)
        )
        assert plan.steps >= 1
        assert program.plan(number) is plan


@each_recipe
def test_over_a_cycle_every_value_is_sent(recipe: str) -> None:
    program = make_planner(recipe)
    total = sum((sent_mask(program, number) for number in program.cycle), torch.zeros(program.signal_numel))
    assert total.ge(1).all()
    fragments = program.method.schedule.fragments
    if not program.method.signal.averaged_names:
        assert total.eq(len(program.cycle) // fragments).all(), "and as often as any other"
    again = program.plan(len(program.cycle))
    assert again.spans == program.plan(0).spans


@each_recipe
def test_gathering_and_scattering_are_opposites_and_touch_what_is_sent_only(recipe: str) -> None:
    method = compose(recipe)
    program = make_planner(recipe, None if method.signal.requires_whole or method.aggregate.state_size else FRAGMENTS)
    for number in program.cycle:
        plan, vector, other = (
            program.plan(number),
            random_values(1, program.signal_numel),
            random_values(2, program.signal_numel),
        )
        before, mask = other.clone(), sent_mask(program, number).bool()
        plan.scatter(plan.gather(vector), other)
        assert torch.equal(other[mask], vector[mask]) and torch.equal(other[~mask], before[~mask])
        gathered = plan.gather(other)
        gathered += 1.0
        plan.scatter(gathered, other)
        assert torch.equal(other[mask], vector[mask] + 1.0), "a view or a copy, what is scattered back stands there"


@each_recipe
def test_no_message_is_longer_than_the_longest(recipe: str) -> None:
    program = make_planner(recipe)
    for number in range(last_round(program)):
        sizes = program.plan(number).max_sizes
        assert max(sizes) <= program.max_part_bytes and sum(sizes) <= program.max_contribution_bytes
        assert len(sizes) <= program.max_parts


@st.composite
def changing(draw: st.DrawFn) -> Tables:
    """Two schedules of the codec at once, over a message in fragments."""
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
@given(changing())
def test_whatever_changes_the_longest_message_is_known_at_the_start(tables: Tables) -> None:
    program = make_planner("diloco", tables)
    longest = max(sum(program.plan(number).max_sizes) for number in range(40))
    assert longest <= program.max_contribution_bytes


def test_negative_control_the_rounds_from_each_breakpoint_on_do_not_tell() -> None:
    """k grows until the kind changes: the longest fragment has its largest k a few rounds before that breakpoint."""
    tables: Tables = {
        "schedule": {"inner_steps": 30, "fragments": 4, "pattern": "contiguous"},
        "codec": {"kind": [constant("topk", 11), "sign"], "k": curve(8, 4000, 20)},
        "topology": {"kind": "gather"},
    }
    program = make_planner("diloco", tables)
    longest = max(sum(program.plan(number).max_sizes) for number in range(40))
    from_each_on = {number + more for number in program.method.breakpoints for more in program.cycle}
    assert (
        max(sum(program.plan(number).max_sizes) for number in from_each_on) < longest == program.max_contribution_bytes
    )


@each_recipe
def test_steps_before_a_round_are_those_of_all_rounds_before(recipe: str) -> None:
    program, steps = make_planner(recipe), 0
    for number in range(last_round(program)):
        assert program.steps_before(number) == steps
        steps += program.plan(number).steps
    assert program.steps_before(3) == sum(program.plan(number).steps for number in range(3)), "in any order of asking"


def test_a_period_that_grows_is_counted_round_by_round() -> None:
    program = make_planner("averaging", {"schedule": {"inner_steps": curve(10, 30, 4)}})
    assert [program.steps_before(number) for number in (6, 1, 5, 0)] == [130, 10, 100, 0]
    assert program.plan(9).steps == 30


@each_recipe
def test_a_message_may_join_rounds_of_the_same_values_in_the_same_code(recipe: str) -> None:
    program = make_planner(recipe)
    for number in program.cycle:
        plan = program.plan(number)
        assert plan.is_compatible_with(plan)
        for later in range(number + 1, number + 4):
            other = program.plan(later)
            same = (plan.spans, plan.part_spans, plan.codecs) == (other.spans, other.part_spans, other.codecs)
            by_round = any(codec.depends_on_round for codec in plan.codecs)
            assert plan.is_compatible_with(other) is (plan.method.signal.is_delta and same and not by_round)


def test_what_does_not_mean_the_same_does_not_join() -> None:
    fragments = make_planner("averaging", FRAGMENTS)
    assert [fragments.plan(0).is_compatible_with(fragments.plan(number)) for number in range(1, 4)] == [
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
    as_made, elsewhere = (shared.plan(number).codecs[0].decode(payload, NUMEL) for number in (0, 1))
    assert not torch.equal(as_made, elsewhere), "the same bytes are other values in the next round"
    assert not shared.plan(0).is_compatible_with(shared.plan(1))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Watching(OuterOptimizer):
    """Notes what it is called with, and moves as plain averaging does."""

    kind: ClassVar[str] = "watching"
    slots: ClassVar[tuple[str, ...]] = ("momentum",)
    seen: ClassVar[list[tuple[int, OuterStep]]] = []

    def apply(  # type: ignore[override]
        self, anchor: torch.Tensor, slots: dict[str, torch.Tensor], delta: torch.Tensor, moment: OuterStep
    ) -> None:
        self.seen.append((delta.numel(), moment))
        anchor -= delta
        slots["momentum"] += delta


def test_a_fragment_moves_its_own_values_and_no_others() -> None:
    Watching.seen.clear()
    program = make_planner(replace(compose("averaging", FRAGMENTS), update=Watching()))
    anchor, slots = torch.zeros(NUMEL), {"momentum": torch.zeros(NUMEL)}
    for number in range(6):
        plan, delta = program.plan(number), random_values(number)
        before, mask = anchor, sent_mask(program, number).bool()
        anchor, slots = program.apply_outer_step(plan, anchor, slots, as_vector(plan.gather(delta)), 0.5, [1.0])
        assert torch.equal(anchor[mask], before[mask] - delta[mask]) and torch.equal(anchor[~mask], before[~mask])
    assert torch.equal(slots["momentum"], -anchor)
    assert [moment.count for _, moment in Watching.seen] == [0, 0, 0, 1, 1, 1], "updates of these values, not rounds"
    assert [moment.local_steps for _, moment in Watching.seen] == [0, 10, 20, 30, 40, 50]
    assert sum(size for size, _ in Watching.seen) == 2 * NUMEL
    for number, (_, moment) in enumerate(Watching.seen):
        section = LAYOUT.select(program.plan(number).spans)
        assert moment.matrix_spans == section.matrix_spans and moment.rate_decay == 0.5


def test_averaged_vectors_move_by_the_whole_mean_in_their_rounds() -> None:
    signal: Tables = {"signal": {"kind": "inner-state", "first_every": 2, "second_every": 2}}
    program = make_planner("averaging", LOSSLESS | NO_PROGRESS | signal)
    anchor, slots = torch.zeros(NUMEL), {name: torch.ones(NUMEL) for name in program.method.slots}
    whole = random_values(1, 3 * NUMEL)
    anchor, slots = program.apply_outer_step(
        program.plan(0), anchor, slots, as_vector(program.plan(0).gather(whole)), 1.0, [1.0]
    )
    assert torch.equal(anchor, -whole[:NUMEL]) and slots["first_moment"].eq(1).all()
    anchor, slots = program.apply_outer_step(
        program.plan(1), anchor, slots, as_vector(program.plan(1).gather(whole)), 1.0, [1.0]
    )
    assert torch.equal(slots["first_moment"], 1 - whole[NUMEL : 2 * NUMEL])
    assert torch.equal(slots["second_moment"], 1 - whole[2 * NUMEL :])
    assert torch.equal(anchor, -2 * whole[:NUMEL])


def test_two_vectors_in_a_message_reach_the_update_together() -> None:
    """NoLoCo's numbers: alpha .5, beta = gamma = .7, phi (0, 2), theta (1, 2)."""
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
    ],
    ids=str,
)
def test_parts_that_do_not_fit_together_are_refused_at_the_start(tables: Tables, reason: str) -> None:
    with pytest.raises(UnknownOption, match=reason) as caught:
        make_planner("averaging", NO_PROGRESS | tables)
    assert "\n" not in str(caught.value)


def test_codecs_are_bound_to_the_tensors_of_their_section_and_the_round() -> None:
    gather: Tables = {"topology": {"kind": "gather"}}
    program = make_planner(replace(compose("averaging", FRAGMENTS | gather), codec=LowRank(rank=2)))
    for number in range(4):
        plan = program.plan(number)
        codec: Codec = plan.codecs[0]
        assert codec.binding is not None and codec.binding.round_number == number
        assert codec.binding.layout == LAYOUT.select(plan.spans)
        assert codec.bound_layout(plan.numel) == codec.binding.layout
    butterfly = make_planner(replace(compose("averaging"), codec=LowRank(rank=2))).plan(2)
    layouts = [
        codec.bound_layout(stop - start)
        for codec, (start, stop) in zip(butterfly.codecs, butterfly.part_spans, strict=True)
    ]
    assert all(layout is not None and len(layout.shapes) == 1 for layout in layouts), "a part is cut across tensors"


def test_more_blocks_than_can_be_remembered_are_refused() -> None:
    blocks = Layout(((2,),) * (MAX_BLOCKS + 1), tuple(range(MAX_BLOCKS + 1)))
    with pytest.raises(UnknownOption, match="blocks"):
        RoundPlanner(compose("edit"), blocks, 1)
    RoundPlanner(compose("edit", {"aggregate": {"statistics": "round"}}), blocks, 1)


def test_what_is_remembered_does_not_change_over_the_rounds() -> None:
    with pytest.raises(UnknownOption, match="must not change"):
        make_planner("edit", {"aggregate": {"statistics": [constant("round", 5), "running"]}})


def step_in_slabs_and_at_once(update: OuterOptimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the anchor and slots after a whole round: moved by the planner, and by the optimizer all at once."""
    signal = PseudoGradientAndAnchor() if "progress-and-anchor" in update.signals else PseudoGradient()
    method = replace(compose("averaging"), update=update, signal=signal)
    numel = SLAB_SIZE + 1000
    program = RoundPlanner(method, Layout(((numel,),)), PART_COUNT)
    delta = random_values(1, numel * signal.vector_count).abs_()
    start, *slots = [random_values(seed, numel).abs_() for seed in (0, *range(2, 2 + len(update.slots)))]
    held = dict(zip(update.slots, slots, strict=True))
    kept = [start.clone(), *(slot.clone() for slot in slots)]
    anchor, after = program.apply_outer_step(program.plan(3), start, held, as_vector(delta), 0.5, [1.0])
    assert all(map(torch.equal, [start, *slots], kept)), "what was before stays as it was"
    update.apply(start, held, delta, program.outer_step(3, 0.5))
    return [anchor, *after.values()], [start, *held.values()]


@pytest.mark.parametrize("update", [kind() for kind in OUTER_OPTIMIZERS.values()], ids=str)
def test_planner_steps_every_outer_optimizer_as_the_optimizer_steps_itself(update: OuterOptimizer) -> None:
    """The planner has shortcuts for linear and elementwise steps; an optimizer that has neither must not get one."""
    for moved, applied in zip(*step_in_slabs_and_at_once(update), strict=True):
        assert torch.equal(moved, applied)


def test_an_update_that_has_a_rate_alone_moves_by_it() -> None:
    """Any other rate than 1 is rounded into each step first."""
    for rate in (1.0, 0.65):
        moved, applied = step_in_slabs_and_at_once(Sgd(learning_rate=rate))
        assert torch.equal(moved[0], applied[0])
    assert not torch.equal(moved[0], step_in_slabs_and_at_once(Sgd())[0][0]), "the control"


def test_an_update_by_a_norm_is_made_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(map(torch.equal, *step_in_slabs_and_at_once(Adam(clip=0.1))))
    monkeypatch.setattr(Adam, "is_elementwise", True)
    assert not all(map(torch.equal, *step_in_slabs_and_at_once(Adam(clip=0.1)))), "the control"

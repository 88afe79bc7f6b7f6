"""The schedule of exchanges: which values are sent in which round."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from optim.errors import UnknownOption
from optim.layout import Layout
from optim.schedules.exchange_schedule import EverySteps, Pattern
from tests.optim.fake_peers import LAYOUT

periods = st.integers(1, 60).flatmap(lambda steps: st.tuples(st.just(steps), st.integers(1, min(steps, 10))))
patterns = st.sampled_from(["strided", "contiguous"])


def count_sent(schedule: EverySteps, rounds: range, layout: Layout) -> list[int]:
    """Return how often each value is sent in these rounds."""
    counts = [0] * layout.numel
    for number in rounds:
        for start, stop in schedule.spans(number, layout):
            for place in range(start, stop):
                counts[place] += 1
    return counts


@given(periods, patterns, st.integers(0, 30))
def test_each_value_is_sent_once_in_a_cycle_from_any_round_on(
    period: tuple[int, int], pattern: Pattern, first: int
) -> None:
    steps, fragments = period
    schedule, layout = EverySteps(inner_steps=steps, fragments=fragments, pattern=pattern), Layout(((2,),) * 12)
    assert count_sent(schedule, range(first, first + fragments), layout) == [1] * layout.numel


MIXTURE = Layout(((2,),) * 12, (0, *(1,) * 5, *(2,) * 5, 3), (-1, -1, 0, 1, 2, 3, -1, 0, 1, 2, 3, -1))


@given(st.integers(1, 3), st.integers(2, 6), patterns, st.integers(0, 30))
def test_experts_are_sent_once_in_every_so_many_cycles_and_the_rest_in_each(
    fragments: int, every: int, pattern: Pattern, first: int
) -> None:
    schedule = EverySteps(inner_steps=6, fragments=fragments, pattern=pattern, experts_every=every)
    assert schedule.period == fragments * every and not schedule.is_whole
    counts = count_sent(schedule, range(first, first + schedule.period), MIXTURE)
    for expert, (start, stop) in zip(MIXTURE.experts, MIXTURE.spans, strict=True):
        assert counts[start:stop] == [every if expert < 0 else 1] * (stop - start)


def test_experts_take_turns_by_their_number() -> None:
    schedule = EverySteps(experts_every=2)
    assert schedule.spans(0, MIXTURE) == ((0, 6), (8, 10), (12, 16), (18, 20), (22, 24))  # experts 0 and 2
    assert schedule.spans(1, MIXTURE) == ((0, 4), (6, 8), (10, 14), (16, 18), (20, 24))
    assert schedule.spans(2, MIXTURE) == schedule.spans(0, MIXTURE)


def test_experts_every_needs_a_model_with_experts() -> None:
    with pytest.raises(UnknownOption, match=r"^schedule\.experts_every = 2: the model has no experts; set it to 1$"):
        EverySteps(experts_every=2).spans(0, LAYOUT)


@given(periods, st.integers(0, 5))
def test_every_cycle_makes_inner_steps(period: tuple[int, int], cycle: int) -> None:
    steps, fragments = period
    schedule = EverySteps(inner_steps=steps, fragments=fragments)
    made = [schedule.steps(number) for number in range(cycle * fragments, (cycle + 1) * fragments)]
    assert sum(made) == steps and min(made) >= 1 and max(made) - min(made) <= 1


@given(periods, st.integers(0, 300))
def test_each_fragment_is_sent_once_per_inner_steps(period: tuple[int, int], total: int) -> None:
    """In T steps it is sent floor(T / H) times; a fragment that is early in the unfinished cycle once more."""
    steps, fragments = period
    schedule = EverySteps(inner_steps=steps, fragments=fragments)
    times, step, number = [0] * fragments, schedule.steps(0), 0
    while step <= total:
        times[number % fragments] += 1
        number += 1
        step += schedule.steps(number)
    assert set(times) <= {total // steps, total // steps + 1}
    assert times[-1] == total // steps
    if total % steps == 0:
        assert set(times) == {total // steps}


def test_strided_and_contiguous_by_hand() -> None:
    layout = Layout(((1,),) * 7, (0, 1, 1, 2, 3, 4, 4))
    strided = EverySteps(fragments=2)
    assert strided.spans(0, layout) == ((0, 1), (3, 4), (5, 7))
    assert strided.spans(3, layout) == ((1, 3), (4, 5))
    contiguous = EverySteps(fragments=2, pattern="contiguous")
    assert contiguous.spans(4, layout) == ((0, 3),)
    assert contiguous.spans(5, layout) == ((3, 7),)


@pytest.mark.parametrize("pattern", ["strided", "contiguous"])
def test_fragments_are_whole_blocks_and_a_single_one_is_everything(pattern: Pattern) -> None:
    edges = {edge for span in LAYOUT.block_spans for edge in span}
    for fragments in (2, 3, len(LAYOUT.block_spans)):
        schedule = EverySteps(inner_steps=50, fragments=fragments, pattern=pattern)
        for number in range(fragments):
            assert {edge for span in schedule.spans(number, LAYOUT) for edge in span} <= edges
    assert EverySteps(pattern=pattern).spans(7, LAYOUT) == ((0, LAYOUT.numel),)


def test_more_fragments_than_blocks_are_refused() -> None:
    with pytest.raises(UnknownOption, match="the model has 10 blocks; use fewer"):
        EverySteps(fragments=11).spans(0, LAYOUT)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"ahead": 3, "delay": 4}, "delay must not be above ahead"),
        ({"inner_steps": 4, "fragments": 5}, "fragments must not be above inner_steps"),
        ({"quorum": 0.0}, "greater than 0"),
        ({"pattern": "random"}, "'strided' or 'contiguous'"),
        ({"inner_steps": 2.5}, "valid integer"),
    ],
)
def test_contradictory_options_are_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        EverySteps(**options)  # type: ignore[arg-type]

"""The spans of tensors, blocks and matrices in a flat vector."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optim.layout import Layout, Span, clip_spans, merge_adjacent

LAYOUT = Layout(((4, 3), (5,), (2, 2), (), (3, 2, 2)), (0, 1, 1, 2, 3))
shapes = st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=8)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    found = draw(shapes)
    steps = draw(st.lists(st.integers(0, 1), min_size=len(found), max_size=len(found)))
    return Layout(tuple(found), tuple(itertools.accumulate(steps)))


@st.composite
def ascending_spans(draw: st.DrawFn) -> tuple[Span, ...]:
    """Draw spans that do not overlap, some of which touch."""
    edges = sorted(draw(st.lists(st.integers(0, 60), max_size=12)))
    return tuple((start, stop) for start, stop in itertools.pairwise(edges) if start < stop and draw(st.booleans()))


def positions(spans: tuple[Span, ...]) -> list[int]:
    return [place for start, stop in spans for place in range(start, stop)]


def test_tensors_blocks_and_matrices_by_hand() -> None:
    assert LAYOUT.numel == 12 + 5 + 4 + 1 + 12
    assert LAYOUT.spans == ((0, 12), (12, 17), (17, 21), (21, 22), (22, 34))
    assert LAYOUT.block_spans == ((0, 12), (12, 21), (21, 22), (22, 34))
    assert LAYOUT.matrix_spans == ((0, 12), (17, 21), (22, 34)), "more than two dimensions count as a matrix"
    assert list(LAYOUT.iter_tensors())[1] == ((5,), (12, 17))
    assert Layout(((2, 2), (2, 2), (3,))).matrix_spans == ((0, 8),), "adjacent ones are merged"


def test_without_blocks_each_tensor_is_a_block() -> None:
    layout = Layout(((2, 2), (3,), (1,)))
    assert layout.block_spans == layout.spans == ((0, 4), (4, 7), (7, 8))


@given(layouts())
def test_tensors_and_blocks_cover_the_vector_once(layout: Layout) -> None:
    assert positions(layout.spans) == positions(layout.block_spans) == list(range(layout.numel))
    assert len(layout.block_spans) == len(set(layout.blocks))
    assert set(positions(layout.matrix_spans)) == {
        place for shape, (start, stop) in layout.iter_tensors() if len(shape) > 1 for place in range(start, stop)
    }


@given(layouts(), st.data())
def test_selection_has_the_chosen_tensors_with_their_blocks(layout: Layout, data: st.DataObject) -> None:
    blocks = data.draw(st.sets(st.sampled_from(sorted(set(layout.blocks)))))
    spans = merge_adjacent([span for span, block in zip(layout.block_spans, sorted(set(layout.blocks)), strict=True)
                    if block in blocks])  # fmt: skip
    section = layout.select(spans)
    wanted = [(shape, block) for shape, block in zip(layout.shapes, layout.blocks, strict=True) if block in blocks]
    assert list(zip(section.shapes, section.blocks, strict=True)) == wanted
    assert section.numel == len(positions(spans))
    assert layout.select(((0, layout.numel),)) == layout


@pytest.mark.parametrize("times", [1, 2, 3])
def test_repeated_layout_is_several_vectors_in_a_row(times: int) -> None:
    repeated = LAYOUT.repeat(times)
    assert repeated.numel == times * LAYOUT.numel
    assert repeated.shapes == LAYOUT.shapes * times
    assert repeated.select([(0, LAYOUT.numel)]).shapes == LAYOUT.shapes
    assert math.prod(repeated.shapes[-1]) == 12
    assert (LAYOUT.repeat(1) is LAYOUT) and LAYOUT.blocks, "one vector keeps its blocks"


@given(ascending_spans())
def test_merging_keeps_all_positions_and_leaves_no_adjacent_spans(spans: tuple[Span, ...]) -> None:
    found = merge_adjacent(spans)
    assert positions(found) == positions(spans)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(found))


@given(ascending_spans(), st.integers(0, 60), st.integers(0, 60))
def test_clipped_spans_are_relative_to_the_start(spans: tuple[Span, ...], start: int, size: int) -> None:
    expected = [place - start for place in positions(spans) if start <= place < start + size]
    assert positions(clip_spans(spans, start, start + size)) == expected

"""Memory is given out again, and never while anybody still holds a view of it."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from optim import memory
from optim.memory import KEPT, LEAST, SIZES, copy, empty, raw, zeros
from optim.vectors import Floats


@pytest.fixture(autouse=True)
def none_free() -> Iterator[None]:
    gc.collect()
    memory._free.clear()
    yield
    memory._free.clear()


def place(array: Floats) -> int:
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


def test_what_nobody_holds_is_given_out_again() -> None:
    array = empty(LEAST)
    before = place(array)
    del array
    assert place(empty(LEAST)) == before


HOLDERS: list[Callable[[Floats], object]] = [
    lambda array: array[5:9],
    lambda array: array[5:9][1:].reshape(-1, 1),
    lambda array: array.data,
    torch.from_numpy,
    lambda array: torch.from_numpy(array)[7:],
    lambda array: torch.from_numpy(array).numpy(),
    lambda array: torch.from_numpy(array)[7:].numpy()[1:].data.cast("B").toreadonly(),
]


@pytest.mark.parametrize("hold", HOLDERS)
def test_no_view_of_any_kind_loses_its_memory(hold: Callable[[Floats], object]) -> None:
    array = empty(LEAST)
    held, before = hold(array), place(array)
    del array
    other = empty(LEAST)
    assert place(other) != before
    del held
    assert place(empty(LEAST)) == before, "the control: without the view it is given out"


def test_only_memory_of_the_same_size_is_taken() -> None:
    array = empty(LEAST)
    del array
    assert empty(2 * LEAST).size == 2 * LEAST
    assert empty(LEAST).size == LEAST


def test_no_more_than_a_few_are_kept() -> None:
    arrays = [empty(LEAST) for _ in range(3 * KEPT)]
    del arrays
    assert [len(waiting) for waiting in memory._free.values()] == [KEPT]


def test_many_small_parts_do_not_drive_out_a_large_vector() -> None:
    large = empty(4 * LEAST)
    before = place(large)
    del large
    parts = [empty(LEAST) for _ in range(3 * KEPT)]
    del parts
    assert place(empty(4 * LEAST)) == before


def test_of_many_sizes_those_asked_for_last_are_kept() -> None:
    first = empty(LEAST)
    before = place(first)
    del first
    for number in range(2 * SIZES):
        empty(LEAST + 1 + number)
        assert place(empty(LEAST)) == before
    assert len(memory._free) == SIZES
    for number in range(SIZES):
        empty(3 * LEAST + number)
    assert 4 * LEAST not in memory._free


def test_zeros_are_zero_and_a_copy_is_one() -> None:
    for numel in (3, LEAST):
        empty(numel).fill(7)
        assert not zeros(numel).any()
        vector = torch.arange(numel, dtype=torch.float32)
        copied = copy(vector)
        assert torch.equal(copied, vector)
        copied += 1
        assert vector[0] == 0


def test_short_vectors_are_left_to_the_allocator() -> None:
    array = raw(LEAST - 1)
    del array
    assert not memory._free

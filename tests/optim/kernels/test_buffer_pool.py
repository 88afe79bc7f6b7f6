"""Memory is reused, and never while there is a view of it."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from optim.kernels import buffer_pool
from optim.kernels.buffer_pool import MAX_FREE_PER_SIZE, MAX_SIZES, MIN_POOLED_BYTES, clone, empty, empty_bytes, zeros
from optim.kernels.vectors import Floats


@pytest.fixture(autouse=True)
def empty_pool() -> Iterator[None]:
    gc.collect()
    buffer_pool._free_by_size.clear()
    yield
    buffer_pool._free_by_size.clear()


def address(array: Floats) -> int:
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


def test_memory_without_views_is_reused() -> None:
    array = empty(MIN_POOLED_BYTES)
    before = address(array)
    del array
    assert address(empty(MIN_POOLED_BYTES)) == before


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
def test_every_kind_of_view_keeps_its_memory(hold: Callable[[Floats], object]) -> None:
    array = empty(MIN_POOLED_BYTES)
    held, before = hold(array), address(array)
    del array
    other = empty(MIN_POOLED_BYTES)
    assert address(other) != before
    del held
    assert address(empty(MIN_POOLED_BYTES)) == before, "the control: without the view it is reused"


def test_only_memory_of_the_same_size_is_reused() -> None:
    array = empty(MIN_POOLED_BYTES)
    del array
    assert empty(2 * MIN_POOLED_BYTES).size == 2 * MIN_POOLED_BYTES
    assert empty(MIN_POOLED_BYTES).size == MIN_POOLED_BYTES


def test_only_a_few_blocks_per_size_are_kept() -> None:
    arrays = [empty(MIN_POOLED_BYTES) for _ in range(3 * MAX_FREE_PER_SIZE)]
    del arrays
    assert [len(waiting) for waiting in buffer_pool._free_by_size.values()] == [MAX_FREE_PER_SIZE]


def test_many_small_parts_do_not_evict_a_large_vector() -> None:
    large = empty(4 * MIN_POOLED_BYTES)
    before = address(large)
    del large
    parts = [empty(MIN_POOLED_BYTES) for _ in range(3 * MAX_FREE_PER_SIZE)]
    del parts
    assert address(empty(4 * MIN_POOLED_BYTES)) == before


def test_sizes_used_last_are_kept() -> None:
    first = empty(MIN_POOLED_BYTES)
    before = address(first)
    del first
    for number in range(2 * MAX_SIZES):
        empty(MIN_POOLED_BYTES + 1 + number)
        assert address(empty(MIN_POOLED_BYTES)) == before
    assert len(buffer_pool._free_by_size) == MAX_SIZES
    for number in range(MAX_SIZES):
        empty(3 * MIN_POOLED_BYTES + number)
    assert 4 * MIN_POOLED_BYTES not in buffer_pool._free_by_size


def test_zeros_are_zero_and_clone_copies() -> None:
    for numel in (3, MIN_POOLED_BYTES):
        empty(numel).fill(7)
        assert not zeros(numel).any()
        vector = torch.arange(numel, dtype=torch.float32)
        copied = clone(vector)
        assert torch.equal(copied, vector)
        copied += 1
        assert vector[0] == 0


def test_short_vectors_come_from_the_allocator() -> None:
    array = empty_bytes(MIN_POOLED_BYTES - 1)
    del array
    assert not buffer_pool._free_by_size

"""Means of sparse vectors: in every span the values that the definition gives."""

import numpy as np
import pytest

from optim.aggregation.sparse_mean import (
    BLOCK_SIZE,
    MeanVector,
    SenderMeanVector,
    SparseBatch,
    SparseMean,
    divide_where_sent,
)
from optim.kernels.vectors import Floats, SparseVector

NUMEL = 2 * BLOCK_SIZE + 1000
SCALES = np.array([1.0, 0.25, 0.7], np.float32)
WEIGHTS = np.array([1.0, 0.5, 0.7], np.float32)


def random_sparse(seed: int) -> SparseVector:
    """Return a vector with a tenth of all positions, of which every fifth has the value zero."""
    rng = np.random.default_rng(seed)
    positions = np.sort(rng.choice(NUMEL, NUMEL // 10, replace=False)).astype(np.int64)
    values = rng.standard_normal(positions.size).astype(np.float32)
    values[::5] = 0
    return SparseVector(positions, values, NUMEL)


VECTORS = [random_sparse(seed) for seed in range(3)]


def weighted_sum() -> Floats:
    """Sum one vector after the other, rounding each product."""
    total = np.zeros(NUMEL, np.float32)
    for vector, scale in zip(VECTORS, SCALES, strict=True):
        total += vector.to_dense() * scale
    return total


def senders() -> Floats:
    weight = np.zeros(NUMEL, np.float32)
    for vector, its_weight in zip(VECTORS, WEIGHTS, strict=True):
        weight += (vector.to_dense() != 0) * its_weight
    return weight


MEAN = MeanVector(SparseBatch.from_vectors(VECTORS), SCALES, np.float32(1.95))
OF_SENDERS = SenderMeanVector(SparseBatch.from_vectors(VECTORS), SCALES, WEIGHTS)
PARTS = [
    slice(0, NUMEL),
    slice(0, 1),
    slice(333, 777),
    slice(999, 2 * BLOCK_SIZE + 7),
    slice(NUMEL - 1, NUMEL),
    slice(5, 5),
]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_decoded_span_equals_the_whole_mean_to_the_bit(part: slice) -> None:
    assert MEAN.decode_slab(part).tobytes() == (weighted_sum() / MEAN.divisor)[part].tobytes()
    weight = senders()
    expected = weighted_sum() / np.where(weight > 0, weight, np.float32(1))
    assert OF_SENDERS.decode_slab(part).tobytes() == expected[part].tobytes()
    assert MEAN.numel == OF_SENDERS.numel == NUMEL


@pytest.mark.parametrize("weight", [-1.0, -0.65, 0.3])
@pytest.mark.parametrize("mean", [MEAN, OF_SENDERS], ids=["mean", "senders"])
def test_sum_with_a_mean_equals_that_with_its_values_to_the_bit(mean: SparseMean, weight: float) -> None:
    """The sum in one pass rounds like the sum with a dense mean."""
    before, out = np.random.default_rng(9).standard_normal((2, NUMEL)).astype(np.float32)
    mean.write_sum(before, weight, out)
    scaled = mean.to_dense() * np.float32(weight)
    assert out.tobytes() == (before + scaled).tobytes() != before.tobytes()
    exact = (before + mean.to_dense().astype(np.float64) * np.float32(weight)).astype(np.float32)
    assert weight == -1 or (out != exact).any(), "the control: a fused multiply-add rounds once"


def test_mean_does_not_depend_on_the_vectors_memory_addresses() -> None:
    """The first vector is right behind the second, whose offsets are therefore negative and wrap around to end at 0."""
    sizes = [vector.values.size for vector in VECTORS]
    positions, values = np.empty(sum(sizes), np.int64), np.empty(sum(sizes) + 3, np.float32)
    moved, end = list[SparseVector](), sum(sizes)
    for vector, size in zip(VECTORS, sizes, strict=True):
        there, its_values = positions[end - size : end], values[3 + end - size : 3 + end]
        there[:], its_values[:] = vector.positions, vector.values
        moved.append(SparseVector(there, its_values, NUMEL))
        end -= size
    stack = SparseBatch.from_vectors(moved)
    assert stack.position_offsets[1] == np.uint64(2**64 - sizes[1])
    assert MeanVector(stack, SCALES, MEAN.divisor).to_dense().tobytes() == MEAN.to_dense().tobytes()


def test_noncontiguous_or_differing_arrays_are_refused() -> None:
    one, two = VECTORS[:2]
    scattered = SparseVector(two.positions[::2], two.values, NUMEL)
    wide = SparseVector(two.positions, two.values.astype(np.float64), NUMEL)
    for bad in (scattered, wide):
        with pytest.raises(ValueError, match="contiguous"):
            SparseBatch.from_vectors([one, bad])


def test_mean_that_underflows_keeps_its_sign() -> None:
    """As in the division of a dense mean; the control is to begin with a plain zero."""
    tiny = SparseVector(np.array([1]), np.array([-1e-45], np.float32), 3)
    mean = MeanVector(SparseBatch.from_vectors([tiny]), np.ones(1, np.float32), np.float32(4))
    expected = tiny.to_dense() / np.float32(4)
    assert np.signbit(mean.to_dense()).tolist() == np.signbit(expected).tolist() == [False, True, False]


def test_member_that_sent_zero_is_not_a_sender_of_that_value() -> None:
    """The control: the mean would differ if positions were counted instead of nonzero values."""
    one = SparseVector(np.array([2, 4]), np.array([3, 5], np.float32), 6)
    zero = SparseVector(np.array([2, 5]), np.array([0, 7], np.float32), 6)
    ones = np.ones(2, np.float32)
    found = SenderMeanVector(SparseBatch.from_vectors([one, zero]), ones, ones)
    assert found.to_dense().tolist() == [0, 0, 3, 0, 5, 7]
    assert MeanVector(SparseBatch.from_vectors([one, zero]), ones, np.float32(2)).to_dense().tolist() == [
        0,
        0,
        1.5,
        0,
        2.5,
        3.5,
    ]


def test_values_without_senders_are_not_divided() -> None:
    total = np.array([0, 6, -0.0], np.float32)
    divide_where_sent(total, np.array([0, 3, 0], np.float32))
    assert total.tobytes() == np.array([0, 2, -0.0], np.float32).tobytes()

"""Means of sparse vectors: value by value what the definition says, in any span."""

import numpy as np
import pytest

from optim.sparse_means import MeanVector, SenderMeanVector, Stack, divide_where_sent
from optim.vectors import Floats, SparseVector

NUMEL = 1000
SCALES = np.array([1.0, 0.25, 0.7], np.float32)
WEIGHTS = np.array([1.0, 0.5, 0.7], np.float32)


def drawn(seed: int) -> SparseVector:
    """A tenth of the values, every fifth of these zero all the same, as a message may have it."""
    rng = np.random.default_rng(seed)
    positions = np.sort(rng.choice(NUMEL, NUMEL // 10, replace=False)).astype(np.int64)
    values = rng.standard_normal(positions.size).astype(np.float32)
    values[::5] = 0
    return SparseVector(positions, values, NUMEL)


VECTORS = [drawn(seed) for seed in range(3)]


def summed() -> Floats:
    """One after the other, each product rounded."""
    total = np.zeros(NUMEL, np.float32)
    for vector, scale in zip(VECTORS, SCALES, strict=True):
        total += vector.dense() * scale
    return total


def senders() -> Floats:
    weight = np.zeros(NUMEL, np.float32)
    for vector, its_weight in zip(VECTORS, WEIGHTS, strict=True):
        weight += (vector.dense() != 0) * its_weight
    return weight


PARTS = [slice(0, NUMEL), slice(0, 1), slice(333, 777), slice(999, 1000), slice(5, 5)]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_span_of_either_mean_is_that_of_the_whole_to_the_bit(part: slice) -> None:
    stack, divisor = Stack.of(VECTORS), np.float32(1.95)
    mean = MeanVector(stack, SCALES, divisor)
    assert mean.span(part).tobytes() == (summed() / divisor)[part].tobytes()
    weight = senders()
    expected = summed() / np.where(weight > 0, weight, np.float32(1))
    found = SenderMeanVector(stack, SCALES, WEIGHTS)
    assert found.span(part).tobytes() == expected[part].tobytes()
    assert mean.numel == found.numel == NUMEL


def test_who_sent_a_zero_is_no_sender_of_that_value() -> None:
    """The control: were positions counted instead of values, the mean would be another."""
    one = SparseVector(np.array([2, 4]), np.array([3, 5], np.float32), 6)
    zero = SparseVector(np.array([2, 5]), np.array([0, 7], np.float32), 6)
    ones = np.ones(2, np.float32)
    found = SenderMeanVector(Stack.of([one, zero]), ones, ones)
    assert found.dense().tolist() == [0, 0, 3, 0, 5, 7]
    assert MeanVector(Stack.of([one, zero]), ones, np.float32(2)).dense().tolist() == [0, 0, 1.5, 0, 2.5, 3.5]


def test_what_nobody_sent_is_not_divided() -> None:
    total = np.array([0, 6, -0.0], np.float32)
    divide_where_sent(total, np.array([0, 3, 0], np.float32))
    assert total.tobytes() == np.array([0, 2, -0.0], np.float32).tobytes()

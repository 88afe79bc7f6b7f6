import math

import numpy as np
import pytest

from optim.kernels.vectors import (
    MAX_SLAB_FACTOR,
    MIN_SLABS,
    SLAB_SIZE,
    ArrayVector,
    ConcatenatedVector,
    DenseVector,
    Floats,
    SparseVector,
    norm,
    slabs,
    wide_slabs,
)


def sparse(numel: int, seed: int) -> SparseVector:
    generator = np.random.default_rng(seed)
    positions = np.sort(generator.choice(numel, numel // 10, replace=False)).astype(np.int64)
    return SparseVector(positions, generator.standard_normal(positions.size).astype(np.float32), numel)


def dense(values: Floats) -> DenseVector:
    return DenseVector(values.size, lambda part, out: np.copyto(out, values[part]))


def test_sparse_and_dense_sum_to_the_same_bits() -> None:
    totals = np.random.default_rng(0).standard_normal((2, SLAB_SIZE + 1000)).astype(np.float32)
    totals[1] = totals[0]
    for seed, weight in enumerate((0.3, 1.0, 12_345.0)):
        vector = sparse(SLAB_SIZE + 1000, seed)
        vector.add_to(totals[0], weight)
        dense(vector.to_dense()).add_to(totals[1], weight)
    assert np.array_equal(totals[0], totals[1])


def test_each_product_is_rounded_before_it_is_added() -> None:
    values = np.random.default_rng(1).standard_normal(10_000).astype(np.float32)
    total = np.ones(10_000, np.float32)
    dense(values).add_to(total, 0.1)
    expected = [float(np.float32(1) + np.float32(np.float32(0.1) * value)) for value in values]
    assert total.tolist() == expected
    # The control: a fused multiply-add, which rounds once instead of twice, gives other bits.
    fused = np.float32(1.0 + np.float64(np.float32(0.1)) * values.astype(np.float64))
    assert (fused.astype(np.float32) != total).any()


def test_sparse_vector_rounds_products_before_adding() -> None:
    vector, total = sparse(10_000, 6), np.ones(10_000, np.float32)
    vector.add_to(total, 0.1)
    expected = np.ones(10_000, np.float32)
    expected[vector.positions] += vector.values * np.float32(0.1)
    assert np.array_equal(total, expected)
    fused = np.float32(1.0 + np.float64(np.float32(0.1)) * vector.values.astype(np.float64))
    assert (fused.astype(np.float32) != total[vector.positions]).any()  # the control


@pytest.mark.parametrize("numel", [1, 2, 3, 1000, SLAB_SIZE, SLAB_SIZE + 1])
def test_norm_agrees_with_fp64(numel: int) -> None:
    values = np.random.default_rng(numel).standard_normal(numel).astype(np.float32)
    expected = math.sqrt(math.fsum(float(value) ** 2 for value in values))
    assert norm(values[part] for part in slabs(numel)) == pytest.approx(expected, rel=1e-14)


def test_nonzero_mask_counts_values_that_are_not_zero() -> None:
    total = np.zeros(4, np.float32)
    SparseVector(np.array([1, 3]), np.array([0, 2], np.float32), 4).add_nonzero_mask_to(total, 5)
    dense(np.array([0, 1, 0, -1], np.float32)).add_nonzero_mask_to(total, 2)
    assert total.tolist() == [0, 2, 0, 7]


@pytest.mark.parametrize("part", [slice(0, 10_000), slice(0, 1), slice(9_990, 10_000), slice(123, 4_567)])
def test_decoded_span_is_part_of_the_whole(part: slice) -> None:
    values = sparse(10_000, 3).to_dense()
    joined = ConcatenatedVector((ArrayVector(values[:123]), sparse(4_000, 4), dense(values[:1]), dense(values[:5_876])))
    for vector in (sparse(10_000, 3), dense(values), ArrayVector(values), joined):
        assert np.array_equal(vector.decode_slab(part), vector.to_dense()[part])
        assert vector.norm() == pytest.approx(np.linalg.norm(vector.to_dense()), rel=1e-6)


@pytest.mark.parametrize("weight", [-1.0, 1.0, -0.65])
def test_sum_is_written_to_a_separate_array(weight: float) -> None:
    before, out = np.random.default_rng(7).standard_normal((2, SLAB_SIZE + 1000)).astype(np.float32)
    vector, kept = sparse(SLAB_SIZE + 1000, 8), before.copy()
    vector.write_sum(before, weight, out)
    assert out.tobytes() == (before + vector.to_dense() * np.float32(weight)).tobytes()
    assert before.tobytes() == kept.tobytes()


def test_concatenated_vectors_follow_one_another() -> None:
    parts = [sparse(size, size) for size in (SLAB_SIZE - 7, 20, SLAB_SIZE + 300)]
    joined = ConcatenatedVector(tuple(parts))
    assert joined.numel == 2 * SLAB_SIZE + 313
    assert np.array_equal(joined.to_dense(), np.concatenate([part.to_dense() for part in parts]))


def test_slab_of_a_sparse_vector_adds_the_same_values() -> None:
    vector, totals = sparse(SLAB_SIZE + 1000, 5), np.ones((2, SLAB_SIZE + 1000), np.float32)
    vector.add_to(totals[0], 0.3)
    for part in slabs(vector.numel, 777):
        vector.add_slab_to(part, totals[1][part], 0.3)
    assert np.array_equal(totals[0], totals[1]) and (totals[0] != 1).any()


@pytest.mark.parametrize(
    "numel", [1, SLAB_SIZE, MIN_SLABS * SLAB_SIZE - 1, 2 * MIN_SLABS * SLAB_SIZE + 7, 1000 * MIN_SLABS * SLAB_SIZE + 7]
)
def test_wide_slabs_cover_the_vector_and_leave_enough_work_for_threads(numel: int) -> None:
    found = list(wide_slabs(numel))
    assert [part.start for part in found] == [0, *(part.stop for part in found[:-1])] and found[-1].stop == numel
    assert max(part.stop - part.start for part in found) <= MAX_SLAB_FACTOR * SLAB_SIZE
    assert len(found) >= min(MIN_SLABS, len(list(slabs(numel))))

import numpy as np
import numpy.typing as npt
import pytest

from optim.codecs.bits.levels import MAX_PAIRWISE, fit_levels, rank_descending

Array = npt.NDArray[np.float32]


def magnitudes(rows: int, keep: int, seed: int = 0) -> Array:
    values = np.abs(np.random.default_rng(seed).standard_t(3, (rows, keep))).astype(np.float32)
    return -np.sort(-values, axis=1)


def fit_rows(rows: Array, count: int) -> tuple[npt.NDArray[np.uint32], Array]:
    """Return the level number of each magnitude, and the levels, of each row of magnitudes in any order."""
    numbers, levels = np.empty(rows.shape, np.uint32), np.empty((len(rows), count), np.float32)
    for row, its_numbers, its_levels in zip(rows, numbers, levels, strict=True):
        fit_levels(row.view(np.uint32), its_numbers, its_levels)
    return numbers, levels


def squared_error(group: Array) -> float:
    return float(((group.astype(np.float64) - group.mean(dtype=np.float64)) ** 2).sum()) if group.size else 0.0


def best_split(row: Array) -> int:
    return min(range(1, row.size + 1), key=lambda place: squared_error(row[:place]) + squared_error(row[place:]))


@pytest.mark.parametrize("size", [1, 2, 64, MAX_PAIRWISE, MAX_PAIRWISE + 1, 4096])
@pytest.mark.parametrize("kinds", [1, 5, 10**6])
def test_ranks_agree_with_a_stable_sort(size: int, kinds: int) -> None:
    values = np.random.default_rng(size).integers(0, kinds, size).astype(np.float32)
    ranks = np.empty(values.size, np.int32)
    rank_descending(values.view(np.uint32), ranks)
    assert np.array_equal(np.argsort(ranks), np.argsort(-values, kind="stable"))


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("size", [3, 64, MAX_PAIRWISE + 1])
def test_order_of_magnitudes_does_not_matter(size: int, count: int) -> None:
    row = magnitudes(1, size)
    order = np.random.default_rng(0).permutation(size)
    numbers, levels = fit_rows(row, count)
    again, same = fit_rows(np.ascontiguousarray(row[:, order]), count)
    assert np.array_equal(levels, same) and np.array_equal(numbers[:, order], again)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("keep", [1, 2, 3, 5, 64])
def test_levels_agree_with_a_loop(count: int, keep: int) -> None:
    rows = magnitudes(20, keep)
    level, levels = fit_rows(rows, count)
    for row, numbers, found in zip(rows, level, levels, strict=True):
        groups = [row]
        while len(groups) < count:
            groups = [half for group in groups for half in np.split(group, [best_split(group) if group.size else 0])]
        assert numbers.tolist() == [count - 1 - i for i, group in enumerate(groups) for _ in group]
        means = [float(group.mean(dtype=np.float64)) for group in groups if group.size]
        assert [found[count - 1 - i] for i, group in enumerate(groups) if group.size] == pytest.approx(means, rel=1e-6)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_levels_ascend_even_where_groups_are_empty(count: int) -> None:
    rows = np.stack([np.ones(8), np.zeros(8), np.array([4.0] * 7 + [1]), np.arange(8, 0, -1)]).astype(np.float32)
    level, levels = fit_rows(rows, count)
    assert (np.diff(levels, axis=1) >= 0).all() and (levels >= 0).all()
    assert level.max() < count
    if count > 1:
        assert np.array_equal(np.take_along_axis(levels, level.astype(np.int64), axis=1)[:3], rows[:3])


def test_four_levels_are_near_the_best_four() -> None:
    """Lloyd's iteration, starting from these levels, gains little."""
    rows = magnitudes(200, 64)
    level, levels = fit_rows(rows, 4)
    error = ((rows - np.take_along_axis(levels, level.astype(np.int64), axis=1)) ** 2).sum()
    better = levels.copy()
    for _ in range(50):
        nearest = np.abs(rows[:, :, None] - better[:, None, :]).argmin(axis=2)
        for group in range(4):
            mask = nearest == group
            sums, counts = (rows * mask).sum(axis=1), mask.sum(axis=1)
            better[:, group] = np.where(counts, sums / np.maximum(counts, 1), better[:, group])
    best = (np.abs(rows[:, :, None] - better[:, None, :]).min(axis=2) ** 2).sum()
    two = fit_rows(rows, 2)
    assert best <= error <= 1.35 * best
    assert error < 0.5 * ((rows - np.take_along_axis(two[1], two[0].astype(np.int64), axis=1)) ** 2).sum()

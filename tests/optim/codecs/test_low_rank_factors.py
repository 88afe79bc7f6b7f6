import numpy as np
import pytest

from optim.codecs.low_rank import (
    RoundedMatrix,
    exact_bits,
    exact_matmul,
    fit_right_factor,
    orthonormalize,
    range_basis,
    round_to_bits,
)


def draw(*shape: int, seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("terms", [1, 3, 64, 4096, 100_000])
def test_sums_of_products_are_the_same_in_any_order(terms: int) -> None:
    """Without rounding, the order changes the sum."""
    left, right = draw(3, terms), draw(terms, 3, seed=1)
    order = np.random.default_rng(2).permutation(terms)
    assert np.array_equal(exact_matmul(left, right), exact_matmul(left[:, order], right[order]))
    assert np.abs(exact_matmul(left, right) - left @ right).max() < 1e-4 * np.sqrt(terms)
    if terms > 64:  # the control
        assert not np.array_equal(left @ right, left[:, order] @ right[order])
    bits = exact_bits(terms)
    assert terms * 2 ** (2 * bits) <= 2**53


def test_rounding_is_by_row_or_column() -> None:
    matrix = np.array([[1000.0, 1.0], [0.0, 1e-9]])
    assert round_to_bits(matrix, 4, axis=1).tolist() == [
        [1024.0, 0.0],
        [0.0, round_to_bits(matrix[1:, 1:], 4, 0)[0, 0]],
    ]
    assert round_to_bits(np.zeros((2, 2)), 4, axis=0).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("shape", [(5, 3), (300, 40), (2000, 7)])
def test_basis_is_orthonormal_with_the_same_span(shape: tuple[int, int]) -> None:
    columns = draw(*shape) * np.logspace(0, -4, shape[1])
    found = orthonormalize(columns)
    assert np.abs(found.T @ found - np.eye(shape[1])).max() < 1e-5
    left_over = columns - found @ (found.T @ columns)
    assert np.abs(left_over).max() < 1e-4


def test_columns_that_depend_on_others_become_zero() -> None:
    columns = draw(50, 4)
    columns[:, 2] = columns[:, 0] - columns[:, 1]
    columns[:, 3] = 0
    found = orthonormalize(columns)
    assert np.abs(found.T @ found - np.diag([1, 1, 0, 0])).max() < 1e-5


def test_fit_has_the_least_error() -> None:
    matrix = draw(60, 50).astype(np.float32)
    columns = draw(60, 6, seed=3)
    found = fit_right_factor(RoundedMatrix(matrix), columns)
    best = np.linalg.lstsq(columns, matrix, rcond=None)[0].T
    assert np.abs(found - best).max() < 1e-4


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e13])
def test_rounded_matrix_multiplies_from_both_sides(scale: float) -> None:
    matrix = (draw(70, 5000) * scale).astype(np.float32)
    operand = RoundedMatrix(matrix)
    right, left = draw(5000, 4, seed=1), draw(70, 4, seed=2)
    assert np.abs(operand.times(right) - matrix @ right).max() < 1e-3 * scale
    assert np.abs(operand.transposed_times(left) - matrix.T @ left).max() < 1e-3 * scale
    columns = range_basis(operand, np.sign(right))
    assert np.abs(columns.T @ columns - np.eye(4)).max() < 1e-5

import numpy as np
import pytest

from optim.codecs.dct_topk import MAX_SIDE, PRECISION_BITS, dct, dct_table, inverse_dct
from tests.optim.codecs.matrix_kernels import run_on_all_kernels

pytestmark = pytest.mark.slow

# Prints digests of a decoded tile's bits, exact and, as the control, by a plain product in fp32.
PROGRAM = """
import hashlib, numpy as np, torch
from optim.codecs.dct_topk import dct_table, inverse_dct
tiles = np.random.default_rng(0).standard_normal((50, 64, 64)).astype(np.float32)
plain = dct_table(64).T.float() @ torch.from_numpy(tiles) @ dct_table(64).float()
for result in (inverse_dct(tiles), plain.numpy()):
    print(hashlib.sha256(result.tobytes()).hexdigest())
"""


def random_tiles(count: int, scale: float = 1.0) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return (np.random.default_rng(count).standard_normal((count, MAX_SIDE, MAX_SIDE)) * scale).astype(np.float32)


@pytest.mark.parametrize("side", [1, 2, 3, 29, 48, 63, 64])
def test_table_is_orthonormal(side: int) -> None:
    scaled = dct_table(side).numpy() / 2.0**PRECISION_BITS
    assert np.abs(scaled @ scaled.T - np.eye(side)).max() < 5e-7
    for axis in (0, 1):
        assert np.abs(dct_table(side).numpy()).sum(axis=axis).max() * 2.0**PRECISION_BITS < 2.0**53 / 2


def test_no_entry_is_so_close_to_a_half_that_another_cosine_rounds_differently() -> None:
    for side in range(1, MAX_SIDE + 1):
        angles = np.pi * (2 * np.arange(side) + 1) * np.arange(side)[:, None] / (2 * side)
        exact = np.cos(angles) * np.sqrt(2 / side) * 2.0**PRECISION_BITS
        exact[0] = 2.0**PRECISION_BITS / np.sqrt(side)
        assert np.array_equal(np.rint(exact), dct_table(side).numpy())
        assert np.abs(exact % 1 - 0.5).min() > 1e-6


def test_transform_of_an_impulse() -> None:
    impulse = np.zeros((1, MAX_SIDE, MAX_SIDE), np.float32)
    impulse[0, 0, 0] = 1
    expected = [np.sqrt((1 if u == 0 else 2) / MAX_SIDE) * np.cos(np.pi * u / (2 * MAX_SIDE)) for u in range(MAX_SIDE)]
    assert dct(impulse[:, :1])[0, 0] == pytest.approx(expected, abs=1e-7)
    assert dct(impulse)[0] == pytest.approx(np.outer(expected, expected), abs=1e-7)
    four = dct(np.array([[[1, 0, 0, 0]]], np.float32))[0, 0]
    assert four == pytest.approx([0.5, 0.6533, 0.5, 0.2706], abs=1e-4)


@pytest.mark.parametrize("shape", [(64, 64), (1, 64), (1, 1), (48, 29), (1, 50), (7, 1)])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e13])
def test_transform_agrees_with_the_formula_and_is_invertible(shape: tuple[int, int], scale: float) -> None:
    values = random_tiles(3, scale)[:, : shape[0], : shape[1]]
    down, across = (dct_table(side).numpy() / 2.0**PRECISION_BITS for side in shape)
    expected = values.astype(np.float64) @ across.T
    expected = down @ expected if shape[0] > 1 else expected
    result = dct(values)
    assert np.abs(result - expected).max() < 2e-7 * np.abs(expected).max()
    assert np.abs(inverse_dct(result) - values).max() < 1e-6 * np.abs(values).max()


def test_tile_does_not_depend_on_its_neighbours() -> None:
    values = random_tiles(65)
    whole = inverse_dct(values)
    for count in (1, 7, 64):
        assert np.array_equal(inverse_dct(values[:count]), whole[:count])


def test_zeros_stay_zeros() -> None:
    assert not inverse_dct(np.zeros((2, MAX_SIDE, MAX_SIDE), np.float32)).any()


def test_all_matrix_kernels_give_the_same_bits() -> None:
    exact, plain = run_on_all_kernels(PROGRAM)
    assert len(exact) == 1
    # The control: a sum that rounds differs between the kernels.
    assert len(plain) > 1

import os
import subprocess
import sys
from typing import Literal

import numpy as np
import pytest

from optim.codecs.cosine import PRECISION, SIDE, TABLE, Dimensions, forward, inverse

# Prints digests of a decoded tile's bits, exact and, as the control, by a plain product in fp32.
PROGRAM = """
import hashlib, numpy as np
from optim.codecs.cosine import TABLE, inverse
tiles = np.random.default_rng(0).standard_normal((50, 64, 64)).astype(np.float32)
plain = (TABLE.astype(np.float32).T @ tiles) @ TABLE.astype(np.float32)
for result in (inverse(tiles, 2), plain):
    print(hashlib.sha256(result.tobytes()).hexdigest())
"""


def tiles(count: int, scale: float = 1.0) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return (np.random.default_rng(count).standard_normal((count, SIDE, SIDE)) * scale).astype(np.float32)


def test_the_table_is_orthonormal() -> None:
    table = TABLE / 2.0**PRECISION
    assert np.abs(table @ table.T - np.eye(SIDE)).max() < 5e-7
    assert np.abs(TABLE).sum(axis=1).max() * 2.0**PRECISION < 2.0**53 / 2
    assert np.abs(TABLE).sum(axis=0).max() * 2.0**PRECISION < 2.0**53 / 2


def test_no_entry_is_so_near_a_half_that_another_cosine_would_round_it_otherwise() -> None:
    angles = np.pi * (2 * np.arange(SIDE) + 1) * np.arange(SIDE)[:, None] / (2 * SIDE)
    exact = np.cos(angles) * np.sqrt(2 / SIDE) * 2.0**PRECISION
    exact[0] = 2.0 ** (PRECISION - 3)
    assert np.array_equal(np.rint(exact), TABLE)
    assert np.abs(exact % 1 - 0.5).min() > 1e-5


def test_the_transform_of_an_impulse() -> None:
    impulse = np.zeros((1, SIDE, SIDE), np.float32)
    impulse[0, 0, 0] = 1
    row = forward(impulse, 1)[0]
    expected = [np.sqrt((1 if u == 0 else 2) / SIDE) * np.cos(np.pi * u / (2 * SIDE)) for u in range(SIDE)]
    assert row[0] == pytest.approx(expected, abs=1e-7) and not row[1:].any()
    assert forward(impulse, 2)[0] == pytest.approx(np.outer(expected, expected), abs=1e-7)


@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e13])
def test_agrees_with_the_formula_and_comes_back(dimensions: Dimensions, scale: float) -> None:
    values = tiles(3, scale)
    table = TABLE / 2.0**PRECISION
    expected = values.astype(np.float64) @ table.T
    expected = table @ expected if dimensions == 2 else expected
    result = forward(values, dimensions)
    assert np.abs(result - expected).max() < 2e-7 * np.abs(expected).max()
    assert np.abs(inverse(result, dimensions) - values).max() < 1e-6 * np.abs(values).max()


@pytest.mark.parametrize("dimensions", [1, 2])
def test_a_tile_does_not_depend_on_its_neighbours(dimensions: Literal[1, 2]) -> None:
    values = tiles(65)
    whole = inverse(values, dimensions)
    for count in (1, 7, 64):
        assert np.array_equal(inverse(values[:count], dimensions), whole[:count])


def test_zeros_stay_zeros() -> None:
    assert not inverse(np.zeros((2, SIDE, SIDE), np.float32), 2).any()


def test_every_matrix_library_gives_the_same_bits() -> None:
    """OpenBLAS run with the kernels of other processors, which sum in other orders and with or without fused steps."""
    digests = []
    for processor in ("Prescott", "Haswell", "Zen"):
        environment = os.environ | {"OPENBLAS_CORETYPE": processor, "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-c", PROGRAM]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        digests.append(result.stdout.split())
    exact, plain = (set(column) for column in zip(*digests, strict=True))
    assert len(exact) == 1
    # The control: a sum that rounds tells the kernels apart.
    assert len(plain) > 1

"""The orthonormal discrete cosine transform of tiles, to the same bits on every machine.

    T[u, i] = c(u) cos(pi (2 i + 1) u / (2 s)),  c(0) = sqrt(1/s), c(u) = sqrt(2/s);  forward T X T^T, and X T^T of rows

A matrix product sums in an order that depends on the library and the processor. Here all sums are exact, so that the
order does not matter: T is rounded to integers / 2^24, each tile to integers of 24 bits and a shared power of two, and
as no row of T has a 1-norm above 8 (s is at most 64), all partial sums are integers below 2^53, which fp64 holds
exactly. The table's integers come from `math.cos`, whose last bit may differ between systems; 2^-24 is 2^28 times
coarser than that bit.
"""

import math
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from optim.vectors import Floats

MAX_SIDE: Final = 64  # of the largest tile
PRECISION_BITS: Final = 24


@lru_cache(maxsize=MAX_SIDE)
def dct_table(side: int) -> torch.Tensor:
    """(side, side) fp64, to be divided by 2^24."""
    share = [math.sqrt((1 if u == 0 else 2) / side) for u in range(side)]
    cosines = [[math.cos(math.pi * (2 * i + 1) * u / (2 * side)) for i in range(side)] for u in range(side)]
    return torch.from_numpy(np.rint(np.array(cosines) * np.array(share)[:, None] * 2.0**PRECISION_BITS))


def dct(tiles: Floats) -> Floats:
    """Coefficients of (count, height, width) finite values. Tiles of height 1 are vectors."""
    return _transform(tiles, dct_table(tiles.shape[1]), dct_table(tiles.shape[2]).T)


def inverse_dct(tiles: Floats) -> Floats:
    """Undo `forward`, to 2^-22 of a tile's largest coefficient or so."""
    return _transform(tiles, dct_table(tiles.shape[1]).T, dct_table(tiles.shape[2]))


def _transform(tiles: Floats, left: torch.Tensor, right: torch.Tensor) -> Floats:
    whole, exponents = _to_integers(torch.from_numpy(tiles).double())
    product = (whole.reshape(-1, len(right)) @ right).reshape(whole.shape)
    if len(left) > 1:
        product, shifts = _to_integers(product)
        product = torch.matmul(left, product)
        exponents += shifts - PRECISION_BITS
    product *= _powers_of_two(exponents - PRECISION_BITS)
    transformed: Floats = product.float().numpy()
    return transformed


def _to_integers(tiles: torch.Tensor) -> tuple[torch.Tensor, npt.NDArray[np.int32]]:
    """Each tile as integers of at most 24 bits, to be multiplied by 2^exponent. Changes `tiles`."""
    flat = tiles.reshape(len(tiles), -1)
    largest = torch.maximum(flat.amax(1), -flat.amin(1)).numpy()
    exponents = np.frexp(largest)[1] - np.int32(PRECISION_BITS)
    tiles *= _powers_of_two(-exponents)
    return tiles.round_(), exponents


def _powers_of_two(exponents: npt.NDArray[np.int32]) -> torch.Tensor:
    """Multiplying fp64 by a power of two is exact so far from the ends of its range."""
    return torch.from_numpy(np.ldexp(1.0, exponents))[:, None, None]

"""Low-rank factors of a matrix by subspace iteration (arXiv 1905.13727, from a cold start), the same on every machine.

A matrix product sums in an order that depends on the library, the processor and the number of threads. Here every sum
is exact, so that the order does not matter: each row on the left and each column on the right is rounded to so few bits
below its largest entry that all partial sums are integers below 2^53 times one power of two, which fp64 holds.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from optim.kernels.buffer_pool import empty
from optim.kernels.parallel import thread_buffer_like
from optim.kernels.vectors import SLAB_SIZE, Floats, slabs

Doubles = npt.NDArray[np.float64]
FLOAT64_BITS = 53  # bits of an fp64
FLOAT32_BITS = 24  # bits of an fp32
ITERATIONS = 1  # each multiplies by the matrix twice more
DEPENDENT_SHARE = 1e-10  # squared share of a column outside the span of those before, below which only rounding is left


def exact_matmul(left: Doubles, right: Doubles) -> Doubles:
    """left @ right, of both rounded."""
    bits = exact_bits(left.shape[1])
    return matmul(round_to_bits(left, bits, axis=1), round_to_bits(right, bits, axis=0))


def matmul(left: Doubles, right: Doubles) -> Doubles:
    """By torch, whose threads `each` keeps in hand; numpy's wait for each other."""
    result: Doubles = (torch.from_numpy(left) @ torch.from_numpy(right)).numpy()
    return result


def exact_bits(terms: int) -> int:
    """Bits of the factors of exact sums of so many products."""
    return (FLOAT64_BITS - terms.bit_length()) // 2


def round_to_bits(matrix: Doubles, bits: int, axis: int) -> Doubles:
    """To `bits` bits below the power of two above the largest entry along the axis."""
    entries = torch.from_numpy(matrix)  # whose reductions of short rows are faster
    largest = torch.maximum(entries.amax(axis, keepdim=True), entries.amin(axis, keepdim=True).neg_()).numpy()
    exponents = np.frexp(largest)[1] - bits
    # Multiplying fp64 by a power of two is exact so far from the ends of its range.
    whole: Doubles = matrix * np.ldexp(1.0, -exponents)
    np.rint(whole, out=whole)
    whole *= np.ldexp(1.0, exponents)
    return whole


class RoundedMatrix:
    """A matrix (a, b) that is multiplied from either side, rounded once to its largest entry."""

    def __init__(self, matrix: Floats) -> None:
        self._bits = exact_bits(max(matrix.shape))
        largest = max(float(matrix.max()), -float(matrix.min()))
        unit = 2.0 ** (int(np.frexp(largest)[1]) - min(self._bits, FLOAT32_BITS))
        # Powers of two, and so few bits that fp32 holds them; subnormal results are nothing beside the largest.
        self._matrix: Floats = empty(matrix.size).reshape(matrix.shape)
        np.multiply(matrix, np.float32(1 / unit), out=self._matrix)
        np.rint(self._matrix, out=self._matrix)
        self._unit = unit

    def times(self, right: Doubles) -> Doubles:
        """(a, b) @ (b, r)"""
        right = round_to_bits(right, self._bits, axis=0)
        return np.concatenate([matmul(rows, right) for _, rows in self._slabs()]) * self._unit

    def transposed_times(self, right: Doubles) -> Doubles:
        """(b, a) @ (a, r)"""
        right = round_to_bits(right, self._bits, axis=0)
        total = np.zeros((self._matrix.shape[1], right.shape[1]))
        for part, rows in self._slabs():
            total += matmul(rows.T, right[part])
        return total * self._unit

    def _slabs(self) -> Iterator[tuple[slice, Doubles]]:
        rows, columns = self._matrix.shape
        for part in slabs(rows, max(1, SLAB_SIZE // columns)):
            doubles = thread_buffer_like("doubles", np.float64, self._matrix[part])
            np.copyto(doubles, self._matrix[part])
            yield part, doubles


def range_basis(matrix: RoundedMatrix, start: Doubles) -> Doubles:
    """(a, r) orthonormal columns that nearly span the r strongest directions; `start`: (b, r)."""
    columns = orthonormalize(matrix.times(start))
    for _ in range(ITERATIONS):
        columns = orthonormalize(matrix.times(orthonormalize(matrix.transposed_times(columns))))
    return columns


def fit_right_factor(matrix: RoundedMatrix, columns: Doubles) -> Doubles:
    """The (b, r) factor Q that brings columns @ Q^T nearest to the matrix."""
    whitening = _whitening(exact_matmul(columns.T, columns))
    return exact_matmul(matrix.transposed_times(exact_matmul(columns, whitening)), whitening.T)


def principal_directions(weights: Doubles, energy: float) -> Doubles:
    """(r, k) orthonormal: the fewest directions of the r columns' span that hold that share of all squares in
    `weights` (b, r), the strongest first."""
    strengths, directions = np.linalg.eigh(exact_matmul(weights.T, weights))
    shares = np.cumsum(np.maximum(strengths[::-1], 0))
    count = 1 + int(np.searchsorted(shares, energy * shares[-1])) if shares[-1] else 1
    return np.flip(directions[:, -count:], 1).copy()


def orthonormalize(columns: Doubles) -> Doubles:
    """A basis of what the columns span, by Cholesky's way of Gram and Schmidt, twice for its loss of precision. A
    column that depends on those before becomes zero."""
    for _ in range(2):
        columns = exact_matmul(columns, _whitening(exact_matmul(columns.T, columns)))
    return columns


def _whitening(gram: Doubles) -> Doubles:
    """Upper triangular W for which the columns of Y W are orthonormal, where `gram` is Y^T Y.

    Elementwise operations with one rounding each, in a fixed order.
    """
    lengths = np.sqrt(gram.diagonal())
    shares = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    rest = gram * shares[:, None] * shares
    whitening = np.diag(shares)
    for j in range(len(rest)):
        factor = 1.0 / np.sqrt(rest[j, j]) if rest[j, j] > DEPENDENT_SHARE else 0.0
        whitening[:, j] *= factor
        along = rest[j, j + 1 :] * factor
        whitening[:, j + 1 :] -= whitening[:, j, None] * along
        rest[j + 1 :, j + 1 :] -= along[:, None] * along
    return whitening

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
FLOAT64_BITS = 53  # bits of precision
FLOAT32_BITS = 24
ITERATIONS = 1  # each one multiplies by the matrix twice
DEPENDENT_SHARE = 1e-10  # squared fraction of a column outside the span of earlier ones that may be rounding error


def exact_matmul(left: Doubles, right: Doubles) -> Doubles:
    """Return left @ right, after rounding both so that the product is exact."""
    bits = exact_bits(left.shape[1])
    return matmul(round_to_bits(left, bits, axis=1), round_to_bits(right, bits, axis=0))


def matmul(left: Doubles, right: Doubles) -> Doubles:
    """Multiply with torch, whose number of threads `parallel_for` controls; numpy's threads wait for each other."""
    result: Doubles = (torch.from_numpy(left) @ torch.from_numpy(right)).numpy()
    return result


def exact_bits(terms: int) -> int:
    """Return the bits to which to round factors, so that sums of `terms` products are exact."""
    return (FLOAT64_BITS - terms.bit_length()) // 2


def round_to_bits(matrix: Doubles, bits: int, axis: int) -> Doubles:
    """Round to `bits` bits below the power of two above the largest entry along the axis."""
    entries = torch.from_numpy(matrix)  # torch reduces short rows faster
    largest = torch.maximum(entries.amax(axis, keepdim=True), entries.amin(axis, keepdim=True).neg_()).numpy()
    exponents = np.frexp(largest)[1] - bits
    # So far from the ends of fp64's range, multiplying by a power of two is exact.
    whole: Doubles = matrix * np.ldexp(1.0, -exponents)
    np.rint(whole, out=whole)
    whole *= np.ldexp(1.0, exponents)
    return whole


class RoundedMatrix:
    """An (a, b) matrix to multiply from either side, rounded once relative to its largest entry."""

    def __init__(self, matrix: Floats) -> None:
        self._bits = exact_bits(max(matrix.shape))
        largest = max(float(matrix.max()), -float(matrix.min()))
        unit = 2.0 ** (int(np.frexp(largest)[1]) - min(self._bits, FLOAT32_BITS))
        # fp32 holds so few bits exactly; subnormal results are negligible compared with the largest entry.
        self._matrix: Floats = empty(matrix.size).reshape(matrix.shape)
        np.multiply(matrix, np.float32(1 / unit), out=self._matrix)
        np.rint(self._matrix, out=self._matrix)
        self._unit = unit

    def times(self, right: Doubles) -> Doubles:
        """Return matrix (a, b) @ right (b, r)."""
        right = round_to_bits(right, self._bits, axis=0)
        return np.concatenate([matmul(rows, right) for _, rows in self._slabs()]) * self._unit

    def transposed_times(self, right: Doubles) -> Doubles:
        """Return matrix^T (b, a) @ right (a, r)."""
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
    """Return (a, r) orthonormal columns that nearly span the r strongest directions; `start` is (b, r)."""
    columns = orthonormalize(matrix.times(start))
    for _ in range(ITERATIONS):
        columns = orthonormalize(matrix.times(orthonormalize(matrix.transposed_times(columns))))
    return columns


def fit_right_factor(matrix: RoundedMatrix, columns: Doubles) -> Doubles:
    """Return the (b, r) factor Q for which columns @ Q^T is closest to the matrix."""
    whitening = _whitening(exact_matmul(columns.T, columns))
    return exact_matmul(matrix.transposed_times(exact_matmul(columns, whitening)), whitening.T)


def principal_directions(weights: Doubles, energy: float) -> Doubles:
    """Return (r, k) orthonormal directions, strongest first, of the span of the r columns of `weights` (b, r).

    They are the fewest that hold the fraction `energy` of the squares of `weights`.
    """
    strengths, directions = np.linalg.eigh(exact_matmul(weights.T, weights))
    cumulative = np.cumsum(np.maximum(strengths[::-1], 0))
    count = 1 + int(np.searchsorted(cumulative, energy * cumulative[-1])) if cumulative[-1] else 1
    return np.flip(directions[:, -count:], 1).copy()


def orthonormalize(columns: Doubles) -> Doubles:
    """Return an orthonormal basis of the columns' span; a column that depends on earlier ones becomes zero.

    This is Cholesky's form of the Gram-Schmidt process, applied twice because it loses precision.
    """
    for _ in range(2):
        columns = exact_matmul(columns, _whitening(exact_matmul(columns.T, columns)))
    return columns


def _whitening(gram: Doubles) -> Doubles:
    """Return an upper triangular W for which the columns of Y W are orthonormal, where `gram` is Y^T Y.

    It consists of elementwise operations with one rounding each, in a fixed order.
    """
    lengths = np.sqrt(gram.diagonal())
    inverse_lengths = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    rest = gram * inverse_lengths[:, None] * inverse_lengths
    whitening = np.diag(inverse_lengths)
    for j in range(len(rest)):
        factor = 1.0 / np.sqrt(rest[j, j]) if rest[j, j] > DEPENDENT_SHARE else 0.0
        whitening[:, j] *= factor
        along = rest[j, j + 1 :] * factor
        whitening[:, j + 1 :] -= whitening[:, j, None] * along
        rest[j + 1 :, j + 1 :] -= along[:, None] * along
    return whitening

"""Each matrix as two factors of low rank in few bits (arXiv 2506.21263; PowerSGD, arXiv 1905.13727, adapted to rounds).

    P = orthonormal basis of M (M^T (M S)), S = random signs from the round and the tensor's index;  P' = as received
    Q = argmin |M - P' Q^T|;  Q' = as received;  decoded = P' Q'^T

PowerSGD averages P between all members, then Q: two exchanges that depend on each other, and a member that leaves
between them spoils both. Here each member sends both factors of its own matrix in one contribution, and the mean of R
contributions has up to R times the rank; its error feedback keeps exactly what its own contribution lacks. Q is fitted
to the rounded P', which need no longer be orthonormal.

A tensor of more than two dimensions counts as a matrix of its first dimension and all others. Vectors, and matrices
with r (a + b) > a b / 2, are sent as 8-bit integers. A codec that is not bound to tensors treats the vector as one
matrix as square as possible, with less than a row left over. The decoded product is a sum of exact terms, which is the
same on every machine.

With `energy` below 1 the rank adapts to the matrix (2506.21263 uses the effective rank of past means): of the r
directions found, each member sends of each matrix the fewest that hold that fraction of their squared norm. Updates
that lose rank over a run then cost less and less, and `rank` is only the maximum.

Payload: header; with `energy` below 1 the rank of each matrix (uint16); for each matrix in order the inner codec's
payloads of P^T and of Q^T; one int8 payload of all the rest.

The factors come from a subspace iteration from a cold start. A matrix product sums in an order that depends on the
library, the processor and the number of threads. Here every sum is exact, so that the order does not matter: each row
on the left and each column on the right is rounded to so few bits below its largest entry that all partial sums are
integers below 2^53 times one power of two, which fp64 holds.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from types import MappingProxyType
from typing import ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.codecs.base import Codec, Payload, matrix_shape
from optim.codecs.bits.deterministic_random import philox_words
from optim.codecs.bits.magnitudes import largest_magnitude
from optim.codecs.floats import Float16
from optim.codecs.int_blocks import BlockInt4, BlockInt8
from optim.errors import CodecError
from optim.kernels.buffer_pool import empty
from optim.kernels.parallel import parallel_for, thread_buffer_like
from optim.kernels.vectors import SLAB_SIZE, DenseVector, Floats, slabs
from optim.layout import Layout, Span
from optim.options import STRICT

Doubles = npt.NDArray[np.float64]
FLOAT64_BITS = 53  # bits of precision
FLOAT32_BITS = 24
ITERATIONS = 1  # each one multiplies by the matrix twice
DEPENDENT_SHARE = 1e-10  # squared fraction of a column outside the span of earlier ones that may be rounding error
FactorCodec = Literal["int4", "int8", "fp16"]
FACTOR_CODECS: Final[Mapping[FactorCodec, Codec]] = MappingProxyType(
    {"int4": BlockInt4(), "int8": BlockInt8(), "fp16": Float16()}
)
REST_CODEC: Final = BlockInt8()
NO_VALUES = np.empty(0, np.float32)
MAX_BASIS_ENTRY = 2.0  # a bound with a margin: no entry of an orthonormal basis is above 1


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


@plain_dataclass(frozen=True)
class MatrixSpan:
    """A matrix within a vector."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns


@plain_dataclass(frozen=True)
class FactoredMatrix:
    """A decoded matrix: (rows, r) and (r, columns) factors, rounded for exact sums."""

    matrix: MatrixSpan
    left: Doubles
    right: Doubles

    def decode_span(self, start: int, stop: int) -> Floats:
        """Return values of the matrix, relative to its own start."""
        columns = self.matrix.columns
        first, last = start // columns, -(-stop // columns)
        rows = matmul(self.left[first:last], self.right).astype(np.float32)
        return rows.ravel()[start - first * columns : stop - first * columns]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LowRank(Codec):
    kind: ClassVar[str] = "low-rank"
    number: ClassVar[int] = 11
    version: ClassVar[int] = 1

    rank: int = Field(default=32, ge=1, le=1024)
    values: FactorCodec = "int4"
    energy: float = Field(default=1.0, gt=0, le=1, description="fraction of the found directions' energy to send")

    @property
    def alignment(self) -> int:
        return 1 << 62  # never cut, because a part of a vector has no matrices

    def max_bytes(self, numel: int) -> int:
        """Return the length of every payload if the rank is fixed, else the largest."""
        matrices, rest = self._split(numel)
        return self._payload_bytes(matrices, [self.rank] * len(matrices), _total_length(rest))

    def bits_per_parameter(self, numel: int) -> float:
        return super().bits_per_parameter(numel) if self._is_adaptive else 8 * self.max_bytes(numel) / numel

    def _payload_bytes(self, matrices: Sequence[MatrixSpan], ranks: Sequence[int], rest_numel: int) -> int:
        """Return the size of a whole payload; `rest_numel` is the number of values outside the matrices."""
        factors = sum(sum(self._factor_bytes(matrix, rank)) for matrix, rank in zip(matrices, ranks, strict=True))
        return (
            2
            + 2 * len(matrices) * self._is_adaptive
            + factors
            + (REST_CODEC.max_bytes(rest_numel) if rest_numel else 0)
        )

    def encode_array(self, values: Floats, subtract: bool) -> Payload:
        largest_magnitude(values)
        matrices, rest = self._split(values.size)
        factors, ranks = [b""] * len(matrices), np.zeros(len(matrices), "<u2")

        def factorize(index: int) -> None:
            matrix = matrices[index]
            whole = values[matrix.start : matrix.stop].reshape(matrix.rows, -1)
            factors[index], ranks[index] = self._encode_factors(whole, index)

        parallel_for(factorize, range(len(matrices)))
        pieces: list[Payload] = [self.header(), ranks.tobytes() if self._is_adaptive else b"", *factors]
        if rest:
            pieces.append(
                REST_CODEC.encode_array(np.concatenate([values[start:stop] for start, stop in rest]), subtract=False)
            )
        payload = b"".join(pieces)
        if subtract:
            self.decode_vector(payload, values.size).subtract_from(values)
        return payload

    def decode_vector(self, payload: Payload, numel: int) -> DenseVector:
        matrices, rest = self._split(numel)
        reader, rest_numel = self.open_payload(payload, numel), _total_length(rest)
        ranks = reader.read("u2", len(matrices)).tolist() if self._is_adaptive else [self.rank] * len(matrices)
        if not all(1 <= rank <= self.rank for rank in ranks):
            raise CodecError(f"a rank is not in 1 to {self.rank}")
        if len(payload) != (expected := self._payload_bytes(matrices, ranks, rest_numel)):
            raise CodecError(f"payload of {len(payload)} bytes; expected {expected}")
        remaining, factored = reader.read_rest(), []
        for matrix, rank in zip(matrices, ranks, strict=True):
            first, second = self._factor_bytes(matrix, rank)
            factored.append(self._decode_factors(remaining[:first], remaining[first : first + second], matrix, rank))
            remaining = remaining[first + second :]
        plain = REST_CODEC.decode_vector(remaining, rest_numel).to_dense() if rest else NO_VALUES
        return DenseVector(numel, MatrixDecoder(factored, rest, plain).decode_into)

    def _encode_factors(self, matrix: Floats, index: int) -> tuple[bytes, int]:
        """Return the payloads of both factors, and their rank."""
        operand = RoundedMatrix(matrix)
        columns = range_basis(operand, self._random_signs(matrix.shape[1], index))
        if self._is_adaptive:
            columns = exact_matmul(columns, principal_directions(operand.transposed_times(columns), self.energy))
        rank = columns.shape[1]
        left = self._factor_codec.encode_array(_flatten_columns(columns), subtract=False)
        received = self._factor_codec.decode_vector(left, rank * len(matrix)).to_dense().reshape(rank, -1).T
        right = self._factor_codec.encode_array(
            _flatten_columns(fit_right_factor(operand, received.astype(np.float64))), subtract=False
        )
        return b"".join((left, right)), rank

    def _decode_factors(self, left: Payload, right: Payload, matrix: MatrixSpan, rank: int) -> FactoredMatrix:
        rows = self._factor_codec.decode_vector(left, rank * matrix.rows).to_dense()
        if max(rows.max(), -rows.min()) > MAX_BASIS_ENTRY:
            raise CodecError("an entry of a basis is too large")
        columns = self._factor_codec.decode_vector(right, rank * matrix.columns).to_dense().reshape(rank, -1)
        bits = exact_bits(rank)
        transposed = np.ascontiguousarray(rows.reshape(rank, -1).T, np.float64)
        return FactoredMatrix(
            matrix, round_to_bits(transposed, bits, axis=1), round_to_bits(columns.astype(np.float64), bits, axis=0)
        )

    def _random_signs(self, columns: int, index: int) -> Doubles:
        """Return random signs that differ for each matrix and round."""
        round_number = -1 if self.binding is None else self.binding.round_number
        count = columns * self.rank
        words = philox_words(f"murmur low rank {round_number} {index}".encode(), -(-count // 64))
        signs: Doubles = np.unpackbits(words.view(np.uint8), count=count).astype(np.float64)
        return (1 - 2 * signs).reshape(columns, self.rank)

    @property
    def _factor_codec(self) -> Codec:
        return FACTOR_CODECS[self.values]

    @property
    def _is_adaptive(self) -> bool:
        return self.energy < 1

    def _factor_bytes(self, matrix: MatrixSpan, rank: int) -> tuple[int, int]:
        inner = self._factor_codec
        return inner.max_bytes(rank * matrix.rows), inner.max_bytes(rank * matrix.columns)

    def _split(self, numel: int) -> tuple[list[MatrixSpan], list[Span]]:
        """Return the matrices to factor, and the spans of all other tensors."""
        matrices: list[MatrixSpan] = []
        rest: list[Span] = []
        for shape, (start, stop) in (self.bound_layout(numel) or _nearly_square(numel)).iter_tensors():
            rows, columns = matrix_shape(shape)
            if 2 * self.rank * (rows + columns) <= rows * columns:
                matrices.append(MatrixSpan(start, rows, columns))
            else:
                rest.append((start, stop))
        return matrices, rest


class MatrixDecoder:
    """Decodes factored matrices and all other values to their places in the vector."""

    def __init__(self, matrices: Sequence[FactoredMatrix], rest: Sequence[Span], plain: Floats) -> None:
        self._matrices = matrices
        self._rest = rest
        self._plain = plain

    def decode_into(self, slab: slice, out: Floats) -> None:
        for factored in self._matrices:
            origin = factored.matrix.start
            for first, last in _overlap((origin, factored.matrix.stop), slab):
                out[first - slab.start : last - slab.start] = factored.decode_span(first - origin, last - origin)
        taken = 0
        for span in self._rest:
            for first, last in _overlap(span, slab):
                start = taken + first - span[0]
                out[first - slab.start : last - slab.start] = self._plain[start : start + last - first]
            taken += span[1] - span[0]


def _total_length(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def _overlap(span: Span, part: slice) -> Iterator[Span]:
    """Yield the part of the span that is in the slab, if any."""
    first, last = max(span[0], part.start), min(span[1], part.stop)
    if first < last:
        yield first, last


def _nearly_square(numel: int) -> Layout:
    rows = math.isqrt(numel)
    columns = numel // rows
    left = numel - rows * columns
    return Layout(((rows, columns), (left,)) if left else ((rows, columns),))


def _flatten_columns(columns: Doubles) -> Floats:
    """Return one column after the other, so that strong and weak directions do not share scales."""
    return np.ascontiguousarray(columns.T, np.float32).ravel()

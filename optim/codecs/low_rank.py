"""Each matrix as two factors of low rank in few bits (arXiv 2506.21263, PowerSGD of arXiv 1905.13727 made for rounds).

    P = orthonormal basis of M (M^T (M S)), S = random signs from the round and the tensor's place;  P' = as received
    Q = argmin |M - P' Q^T|;  Q' = as received;  decoded = P' Q'^T

PowerSGD averages P between all members, then Q: two exchanges that depend on each other, and whoever leaves between
them spoils both. Here each member sends both factors of its own matrix in one message, and the mean of R messages has
up to R times the rank; its error feedback keeps exactly what its own message lacks. Q is fitted to P' as it was
rounded, which need no longer be orthonormal.

A tensor of more than two dimensions counts as a matrix of its first dimension and all others. Vectors, and matrices
with r (a + b) > a b / 2, travel as 8-bit integers. A codec that is not bound to tensors takes the vector as one matrix
as square as possible, with less than a row left over. The decoded product is a sum of exact terms (subspace.py): the
same bits on every machine.

With `energy` below 1 the rank adapts to what there is to send (2506.21263 goes by the effective rank of past means): of
the r directions found, each member sends of each matrix the fewest that hold that share of their squared norm. Updates
that lose rank over a run then cost less and less, and `rank` is only the most.

Payload: head; with `energy` below 1 the rank of each matrix (uint16); for each matrix in order the inner codec's
payloads of P^T and of Q^T; one int8 payload of all the rest.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from types import MappingProxyType
from typing import ClassVar, Final, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.codecs.codec import Codec, Payload, two_dimensions
from optim.codecs.dense import HalfPrecision, largest_magnitude
from optim.codecs.integers import BlockInt4, BlockInt8
from optim.codecs.noise import raw_words
from optim.codecs.subspace import (
    Doubles,
    Operand,
    basis,
    fitted,
    multiplied,
    precision,
    product,
    rounded,
    strongest,
)
from optim.errors import CodecError
from optim.layout import Layout, Span
from optim.parts import STRICT
from optim.threads import each
from optim.vectors import DenseVector, Floats

Inner = Literal["int4", "int8", "fp16"]
INNER: Final[Mapping[Inner, Codec]] = MappingProxyType(
    {"int4": BlockInt4(), "int8": BlockInt8(), "fp16": HalfPrecision()}
)
REST: Final = BlockInt8()
NOTHING = np.empty(0, np.float32)
LONGEST = 2.0  # no entry of an orthonormal basis is above 1


@plain_dataclass(frozen=True)
class Matrix:
    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns


@plain_dataclass(frozen=True)
class Factored:
    """A decoded matrix: (rows, r) and (r, columns), rounded for exact sums."""

    matrix: Matrix
    left: Doubles
    right: Doubles

    def span(self, start: int, stop: int) -> Floats:
        """Values of the matrix, counted from its own start."""
        columns = self.matrix.columns
        first, last = start // columns, -(-stop // columns)
        rows = multiplied(self.left[first:last], self.right).astype(np.float32)
        return rows.ravel()[start - first * columns : stop - first * columns]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LowRank(Codec):
    kind: ClassVar[str] = "low-rank"
    number: ClassVar[int] = 11
    version: ClassVar[int] = 1

    rank: int = Field(default=32, ge=1, le=1024)
    values: Inner = "int4"
    energy: float = Field(default=1.0, gt=0, le=1, description="share of the found directions' energy that is sent")

    @property
    def alignment(self) -> int:
        return 1 << 62  # never cut: parts of a vector know nothing of its matrices

    def max_bytes(self, numel: int) -> int:
        """Every payload has this length if the rank is fixed."""
        matrices, rest = self._split(numel)
        return self._bytes(matrices, [self.rank] * len(matrices), _length(rest))

    def bits_per_parameter(self, numel: int) -> float:
        return super().bits_per_parameter(numel) if self._adapts else 8 * self.max_bytes(numel) / numel

    def _bytes(self, matrices: Sequence[Matrix], ranks: Sequence[int], left: int) -> int:
        """Of a whole payload; `left`: values that are in no matrix."""
        factors = sum(sum(self._factor_bytes(matrix, rank)) for matrix, rank in zip(matrices, ranks, strict=True))
        return 2 + 2 * len(matrices) * self._adapts + factors + (REST.max_bytes(left) if left else 0)

    def write(self, values: Floats, subtract: bool) -> Payload:
        largest_magnitude(values)
        matrices, rest = self._split(values.size)
        factors, ranks = [b""] * len(matrices), np.zeros(len(matrices), "<u2")

        def factorize(index: int) -> None:
            matrix = matrices[index]
            whole = values[matrix.start : matrix.stop].reshape(matrix.rows, -1)
            factors[index], ranks[index] = self._factors(whole, index)

        each(factorize, range(len(matrices)))
        pieces: list[Payload] = [self.head(), ranks.tobytes() if self._adapts else b"", *factors]
        if rest:
            pieces.append(REST.write(np.concatenate([values[start:stop] for start, stop in rest]), subtract=False))
        payload = b"".join(pieces)
        if subtract:
            self.read(payload, values.size).subtract_from(values)
        return payload

    def read(self, payload: Payload, numel: int) -> DenseVector:
        matrices, rest = self._split(numel)
        reader, left = self.open(payload, numel), _length(rest)
        ranks = reader.take("u2", len(matrices)).tolist() if self._adapts else [self.rank] * len(matrices)
        if not all(1 <= rank <= self.rank for rank in ranks):
            raise CodecError(f"a rank that is not in 1 to {self.rank}")
        if len(payload) != (expected := self._bytes(matrices, ranks, left)):
            raise CodecError(f"payload of {len(payload)} bytes where there must be {expected}")
        remaining, factored = reader.rest(), []
        for matrix, rank in zip(matrices, ranks, strict=True):
            first, second = self._factor_bytes(matrix, rank)
            factored.append(self._read_factors(remaining[:first], remaining[first : first + second], matrix, rank))
            remaining = remaining[first + second :]
        plain = REST.read(remaining, left).dense() if rest else NOTHING
        return DenseVector(numel, Decoded(factored, rest, plain).restore)

    def _factors(self, matrix: Floats, index: int) -> tuple[bytes, int]:
        """The payloads of both, and their rank."""
        operand = Operand(matrix)
        columns = basis(operand, self._start(matrix.shape[1], index))
        if self._adapts:
            columns = product(columns, strongest(operand.transposed_times(columns), self.energy))
        rank = columns.shape[1]
        left = self._inner.write(_flat(columns), subtract=False)
        received = self._inner.read(left, rank * len(matrix)).dense().reshape(rank, -1).T
        right = self._inner.write(_flat(fitted(operand, received.astype(np.float64))), subtract=False)
        return b"".join((left, right)), rank

    def _read_factors(self, left: Payload, right: Payload, matrix: Matrix, rank: int) -> Factored:
        rows = self._inner.read(left, rank * matrix.rows).dense()
        if max(rows.max(), -rows.min()) > LONGEST:
            raise CodecError("a basis is longer than one")
        columns = self._inner.read(right, rank * matrix.columns).dense().reshape(rank, -1)
        bits = precision(rank)
        transposed = np.ascontiguousarray(rows.reshape(rank, -1).T, np.float64)
        return Factored(matrix, rounded(transposed, bits, axis=1), rounded(columns.astype(np.float64), bits, axis=0))

    def _start(self, columns: int, index: int) -> Doubles:
        """Random signs, other ones for each matrix and round."""
        round_number = -1 if self.binding is None else self.binding.round_number
        count = columns * self.rank
        words = raw_words(f"murmur low rank {round_number} {index}".encode(), -(-count // 64))
        signs: Doubles = np.unpackbits(words.view(np.uint8), count=count).astype(np.float64)
        return (1 - 2 * signs).reshape(columns, self.rank)

    @property
    def _inner(self) -> Codec:
        return INNER[self.values]

    @property
    def _adapts(self) -> bool:
        return self.energy < 1

    def _factor_bytes(self, matrix: Matrix, rank: int) -> tuple[int, int]:
        inner = self._inner
        return inner.max_bytes(rank * matrix.rows), inner.max_bytes(rank * matrix.columns)

    def _split(self, numel: int) -> tuple[list[Matrix], list[Span]]:
        """The matrices that are factored, and the spans of all other tensors."""
        matrices: list[Matrix] = []
        rest: list[Span] = []
        for shape, (start, stop) in (self.layout_of(numel) or _square(numel)).tensors():
            rows, columns = two_dimensions(shape)
            if 2 * self.rank * (rows + columns) <= rows * columns:
                matrices.append(Matrix(start, rows, columns))
            else:
                rest.append((start, stop))
        return matrices, rest


class Decoded:
    """Factored matrices and all other values, each where it belongs."""

    def __init__(self, matrices: Sequence[Factored], rest: Sequence[Span], plain: Floats) -> None:
        self._matrices = matrices
        self._rest = rest
        self._plain = plain

    def restore(self, part: slice, out: Floats) -> None:
        for factored in self._matrices:
            origin = factored.matrix.start
            for first, last in _common((origin, factored.matrix.stop), part):
                out[first - part.start : last - part.start] = factored.span(first - origin, last - origin)
        taken = 0
        for span in self._rest:
            for first, last in _common(span, part):
                place = taken + first - span[0]
                out[first - part.start : last - part.start] = self._plain[place : place + last - first]
            taken += span[1] - span[0]


def _length(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def _common(span: Span, part: slice) -> Iterator[Span]:
    """What of the span lies in the part, if anything."""
    first, last = max(span[0], part.start), min(span[1], part.stop)
    if first < last:
        yield first, last


def _square(numel: int) -> Layout:
    rows = math.isqrt(numel)
    columns = numel // rows
    left = numel - rows * columns
    return Layout(((rows, columns), (left,)) if left else ((rows, columns),))


def _flat(columns: Doubles) -> Floats:
    """One column after the other, so that scales are not shared between strong and weak directions."""
    return np.ascontiguousarray(columns.T, np.float32).ravel()

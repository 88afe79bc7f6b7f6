"""Compare contributions with one another: the cosine of each with the mean of the others, and pairs that are copies.

All sums of products are in fp64, in an order that depends on the lengths alone, so that all peers get the same bits.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from optim.aggregation.contribution_memory import sketch_cosine
from optim.aggregation.sparse_mean import BLOCK_SIZE, Offsets, SparseBatch
from optim.kernels.jit import kernel
from optim.kernels.parallel import parallel_for, thread_buffer
from optim.kernels.vectors import Floats, Positions, SparseVector, Vector, dot, slabs, wide_slabs

Doubles = npt.NDArray[np.float64]

CANDIDATE_COSINE: Final = 0.9  # of sketches; their cosine is within 0.05 of that of the vectors, nearly always
COPY_COSINE: Final = 0.999


def cosines_with_others(vectors: Sequence[Vector], norms: Sequence[float], scales: Sequence[float]) -> list[float]:
    """Return the cosine of each vector with the sum of the others, sum_j scale_j x_j.

    With S the sum of all, only the products <x_i, S> need a pass over the vectors:

        <x_i, S - s_i x_i> = <x_i, S> - s_i |x_i|^2;  |S|^2 = sum_i s_i <x_i, S>
        |S - s_i x_i|^2 = |S|^2 - 2 s_i <x_i, S> + s_i^2 |x_i|^2

    It is 0 where the vector or the sum is zero.
    """
    products = _products_with_sum(vectors, np.array(scales, np.float32))
    scales = [float(np.float32(scale)) for scale in scales]
    total = sum(scale * product for scale, product in zip(scales, products, strict=True))
    found = []
    for product, size, scale in zip(products, norms, scales, strict=True):
        own = scale * size * size
        others = max(0.0, total - 2 * scale * product + scale * own)
        found.append((product - own) / (size * float(np.sqrt(others))) if size and others else 0.0)
    return found


def find_copies(vectors: Sequence[Vector], norms: Sequence[float], sketches: Sequence[Floats]) -> list[int]:
    """Return the indices of vectors that have the direction of an earlier one, in order.

    Sketches find the candidates, so that few pairs are compared in full, and a copy is compared with no other.
    """
    originals, copies = list[int](), list[int]()
    for index, own in enumerate(sketches):
        near = (one for one in originals if sketch_cosine(sketches[one], own) > CANDIDATE_COSINE)
        if any(_product(vectors[one], vectors[index]) > COPY_COSINE * norms[one] * norms[index] for one in near):
            copies.append(index)
        else:
            originals.append(index)
    return copies


def _product(one: Vector, other: Vector) -> float:
    return dot((one.decode_slab(part), other.decode_slab(part)) for part in slabs(one.numel))


def _products_with_sum(vectors: Sequence[Vector], scales: Floats) -> list[float]:
    """Return <x_i, sum_j scale_j x_j> for each vector."""
    sparse = [vector for vector in vectors if isinstance(vector, SparseVector)]
    batch = SparseBatch.from_vectors(sparse) if len(sparse) == len(vectors) else None
    parts = list(wide_slabs(vectors[0].numel) if batch else slabs(vectors[0].numel))
    products = np.zeros((len(parts), len(vectors)), np.float64)

    def multiply(index: int) -> None:
        if batch is None:
            products[index] = _dense_products(vectors, scales, parts[index])
        else:
            _add_sparse_products(batch, scales, parts[index], products[index])

    parallel_for(multiply, range(len(parts)))
    return [float(value) for value in np.add.accumulate(products, axis=0)[-1]]


def _dense_products(vectors: Sequence[Vector], scales: Floats, part: slice) -> list[float]:
    rows, total = [vector.decode_slab(part) for vector in vectors], np.zeros(part.stop - part.start, np.float32)
    for row, scale in zip(rows, scales, strict=True):
        total += row * scale
    return [dot([(row, total)]) for row in rows]


def _add_sparse_products(batch: SparseBatch, scales: Floats, part: slice, products: Doubles) -> None:
    first, (sums,) = batch.vectors[0], thread_buffer("agreement", np.float32, BLOCK_SIZE).reshape(1, BLOCK_SIZE)
    offsets, ends = batch.find_offsets(part)
    _multiply_with_sums(
        first.positions, first.values, offsets, ends, batch.value_shifts, scales, part.start, part.stop, sums, products
    )


@kernel
def _multiply_with_sums(
    positions: Positions,
    values: Floats,
    offsets: Offsets,
    ends: Offsets,
    shifts: Offsets,
    scales: Floats,
    start: int,
    stop: int,
    sums: Floats,
    products: Doubles,
) -> None:
    """Add <x_i, sum_j scale_j x_j> over the span from `start` to `stop` to `products`, block by block.

    Reads each vector from its offset in `offsets`, which moves along, up to `ends`.
    """
    for first in range(start, stop, sums.size):
        end = min(first + sums.size, stop)
        sums[:] = 0
        for vector in range(ends.size):
            item = offsets[vector]
            while item != ends[vector] and positions[item] < end:
                sums[np.uint64(positions[item] - first)] += values[item + shifts[vector]] * scales[vector]
                item += np.uint64(1)
        for vector in range(ends.size):
            item, product = offsets[vector], np.float64(0)
            while item != ends[vector] and positions[item] < end:
                value = np.float64(values[item + shifts[vector]])
                product += value * sums[np.uint64(positions[item] - first)]
                item += np.uint64(1)
            products[vector] += product
            offsets[vector] = item

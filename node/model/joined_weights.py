"""Joining matrices that follow one another in the flat vector into one matrix.

Attention multiplies its input by query, key and value weights, the MLP by gate and up weights. One product with the
joined matrix is faster than two or three, and large neighbours in memory are joined without a copy.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

COPY_ELEMENTS = 2**18  # copying fewer is faster than a Python function in the autograd graph


def join_rows(*matrices: Tensor) -> Tensor:
    """Return one matrix with the rows of all `matrices`, which have equally many columns.

    A large result shares the memory of its parts if they are neighbours.
    """
    if torch.compiler.is_compiling() or sum(matrix.numel() for matrix in matrices) < COPY_ELEMENTS:
        return torch.cat(matrices)
    if not _are_neighbours(matrices):
        return torch.cat(matrices)
    return _SharedRows.apply(*matrices)  # type: ignore[no-any-return, no-untyped-call]


def _are_neighbours(matrices: Sequence[Tensor]) -> bool:
    address, storage = matrices[0].data_ptr(), matrices[0].untyped_storage().data_ptr()
    for matrix in matrices:
        in_place = matrix.data_ptr() == address and matrix.untyped_storage().data_ptr() == storage
        if not in_place or not matrix.is_contiguous():
            return False
        address += matrix.nbytes
    return True


class _SharedRows(torch.autograd.Function):
    """Concatenate rows that are neighbours in memory, without a copy."""

    @staticmethod
    def forward(ctx: Any, *matrices: Tensor) -> Tensor:
        ctx.rows = [len(matrix) for matrix in matrices]
        first = matrices[0].detach()
        return first.as_strided((sum(ctx.rows), first.shape[1]), first.stride())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return torch.split(gradients[0], ctx.rows)

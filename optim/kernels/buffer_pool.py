"""A pool of memory for long vectors, reused once no view of it is left.

The system hands out memory in pages and fills each with zeros when it is first touched. A merge allocates vectors of
the model's size and drops them again, for which that would take as long as the arithmetic.
"""

import mmap
import weakref
from collections import deque
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from optim.kernels.vectors import Floats

MIN_POOLED_BYTES = 1 << 18  # numpy's allocator reuses smaller blocks itself
MAX_FREE_PER_SIZE = 4  # free blocks of each size
MAX_SIZES = 32  # the last used ones; many, so that small parts of a contribution do not evict the few large vectors

Bytes = npt.NDArray[np.uint8]
Number = TypeVar("Number", bound=np.number[Any])
_free_by_size: dict[int, deque[mmap.mmap]] = {}  # keyed by size, the last used one at the end


def empty_bytes(size: int) -> Bytes:
    """Return (size,) uninitialized bytes."""
    if size < MIN_POOLED_BYTES:
        return np.empty(size, np.uint8)
    memory = _take_free(size) or _map_pages(size)
    # Views refer to this array, not to the memory behind it, because numpy stops at the last array in the chain of
    # bases. When this array is freed, there are no views left.
    array: Bytes = np.frombuffer(memory, np.uint8)
    weakref.finalize(array, _release, memory)
    return array


def empty(numel: int) -> Floats:
    """Return (numel,) uninitialized fp32 values."""
    return empty_array(np.float32, numel)


def empty_array(dtype: type[Number], numel: int) -> npt.NDArray[Number]:
    """Return (numel,) uninitialized values of a type."""
    return empty_bytes(np.dtype(dtype).itemsize * numel).view(dtype)


def zeros(numel: int) -> Floats:
    """Return (numel,) fp32 zeros."""
    array = empty(numel)
    array.fill(0)
    return array


def clone(vector: torch.Tensor) -> torch.Tensor:
    """Return a copy of a flat fp32 tensor on the CPU."""
    return torch.from_numpy(empty(vector.numel())).copy_(vector)


def _map_pages(size: int) -> mmap.mmap:
    """Map memory, in large pages where the system has them: a pass over small ones takes 25 % longer."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel has no huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _release(memory: mmap.mmap) -> None:
    """Put a block back into the pool; the system may reclaim its pages when memory is short."""
    if hasattr(mmap, "MADV_FREE"):
        memory.madvise(mmap.MADV_FREE)
    _free_by_size.setdefault(len(memory), deque(maxlen=MAX_FREE_PER_SIZE)).append(memory)
    if len(_free_by_size) > MAX_SIZES:
        _free_by_size.pop(list(_free_by_size)[0], None)


def _take_free(size: int) -> mmap.mmap | None:
    """Take a free block of that size, if there is one.

    Vectors are created and freed in any thread, and even during this function. Each step is atomic, so that a race can
    only lose a block to the system.
    """
    free_blocks = _free_by_size.pop(size, None)
    if free_blocks is None:
        return None
    _free_by_size[size] = free_blocks
    try:
        return free_blocks.pop()
    except IndexError:
        return None

"""Memory for long vectors, given out again once nobody holds them.

The system hands memory out in pages, each filled with zeros when it is first touched. Where a merge makes vectors of
the model's size and drops them again, that takes as long as the arithmetic on them.
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

MIN_POOLED_BYTES = 1 << 18  # bytes; what is shorter comes from an allocator that keeps small memory itself
MAX_FREE_PER_SIZE = 4  # pieces of memory that nobody holds, of each size
MAX_SIZES = 32  # those that were asked for last: a message's many small parts must not drive out the few large vectors

Bytes = npt.NDArray[np.uint8]
Number = TypeVar("Number", bound=np.number[Any])
_free_by_size: dict[int, deque[mmap.mmap]] = {}  # by size, that which was asked for last at the end


def empty_bytes(size: int) -> Bytes:
    """(size,) bytes with anything in them."""
    if size < MIN_POOLED_BYTES:
        return np.empty(size, np.uint8)
    memory = _take_free(size) or _map_pages(size)
    # Views hold this array, not the memory behind it, as numpy looks no deeper than to the last array: when it goes,
    # nobody has a view any more.
    array: Bytes = np.frombuffer(memory, np.uint8)
    weakref.finalize(array, _release, memory)
    return array


def empty(numel: int) -> Floats:
    """(numel,) fp32 with anything in it."""
    return empty_array(np.float32, numel)


def empty_array(dtype: type[Number], numel: int) -> npt.NDArray[Number]:
    """(numel,) numbers of that kind."""
    return empty_bytes(np.dtype(dtype).itemsize * numel).view(dtype)


def zeros(numel: int) -> Floats:
    """(numel,) fp32."""
    array = empty(numel)
    array.fill(0)
    return array


def clone(vector: torch.Tensor) -> torch.Tensor:
    """Of a flat fp32 tensor on the CPU."""
    return torch.from_numpy(empty(vector.numel())).copy_(vector)


def _map_pages(size: int) -> mmap.mmap:
    """In large pages where the system has them: a pass over small ones takes a quarter longer."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _release(memory: mmap.mmap) -> None:
    """Where other programs run short, the system takes its pages; until then they stay as they are."""
    if hasattr(mmap, "MADV_FREE"):
        memory.madvise(mmap.MADV_FREE)
    _free_by_size.setdefault(len(memory), deque(maxlen=MAX_FREE_PER_SIZE)).append(memory)
    if len(_free_by_size) > MAX_SIZES:
        _free_by_size.pop(list(_free_by_size)[0], None)


def _take_free(size: int) -> mmap.mmap | None:
    """Vectors come and go in any thread, and in the middle of this: each step is atomic, and what two threads do at
    once may lose a piece of memory to the system, no more."""
    waiting = _free_by_size.pop(size, None)
    if waiting is None:
        return None
    _free_by_size[size] = waiting
    try:
        return waiting.pop()
    except IndexError:
        return None

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

from optim.vectors import Floats

LEAST = 1 << 18  # bytes; what is shorter comes from an allocator that keeps small memory itself
KEPT = 4  # pieces of memory that nobody holds, of each size
SIZES = 32  # those that were asked for last: a message's many small parts must not drive out the few large vectors

Bytes = npt.NDArray[np.uint8]
Number = TypeVar("Number", bound=np.number[Any])
_free: dict[int, deque[mmap.mmap]] = {}  # by size, that which was asked for last at the end


def raw(size: int) -> Bytes:
    """(size,) bytes with anything in them."""
    if size < LEAST:
        return np.empty(size, np.uint8)
    memory = _of_size(size) or _mapped(size)
    # Views hold this array, not the memory behind it, as numpy looks no deeper than to the last array: when it goes,
    # nobody has a view any more.
    array: Bytes = np.frombuffer(memory, np.uint8)
    weakref.finalize(array, _put_back, memory)
    return array


def empty(numel: int) -> Floats:
    """(numel,) fp32 with anything in it."""
    return empty_of(np.float32, numel)


def empty_of(number: type[Number], numel: int) -> npt.NDArray[Number]:
    """(numel,) numbers of that kind."""
    return raw(np.dtype(number).itemsize * numel).view(number)


def zeros(numel: int) -> Floats:
    """(numel,) fp32."""
    array = empty(numel)
    array.fill(0)
    return array


def copy(vector: torch.Tensor) -> torch.Tensor:
    """Of a flat fp32 tensor on the CPU."""
    return torch.from_numpy(empty(vector.numel())).copy_(vector)


def _mapped(size: int) -> mmap.mmap:
    """In large pages where the system has them: a pass over small ones takes a quarter longer."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _put_back(memory: mmap.mmap) -> None:
    """Where other programs run short, the system takes its pages; until then they stay as they are."""
    if hasattr(mmap, "MADV_FREE"):
        memory.madvise(mmap.MADV_FREE)
    _free.setdefault(len(memory), deque(maxlen=KEPT)).append(memory)
    if len(_free) > SIZES:
        _free.pop(list(_free)[0], None)


def _of_size(size: int) -> mmap.mmap | None:
    """Vectors come and go in any thread, and in the middle of this: each step is atomic, and what two threads do at
    once may lose a piece of memory to the system, no more."""
    waiting = _free.pop(size, None)
    if waiting is None:
        return None
    _free[size] = waiting
    try:
        return waiting.pop()
    except IndexError:
        return None

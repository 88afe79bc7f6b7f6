"""Elementwise work on slabs of memory, in as many threads as torch would use in the caller's place.

Torch's own threads wait for one another at the end of each operation; on a busy machine that takes twenty times as long
as the operation. Here each thread takes the next slab when it has finished one. The workers are our own threads, in
which torch uses a single thread; both torch and numpy release the interpreter's lock while they compute.
"""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

Item = TypeVar("Item")
MAX_THREADS = 8  # more threads would only wait for memory
THREAD_NAME_PREFIX = "slabs"  # of the worker threads
ALIGNMENT = 64  # bytes: a cache line and the widest register; a store across two lines takes twice as long

_pool_lock = threading.Lock()
_local = threading.local()


def parallel_for(work: Callable[[Item], object], items: Iterable[Item]) -> None:
    """Call `work` for every item, in any order, and raise its exceptions. Nested calls are plain loops."""
    work_items = list(items)
    threads = min(torch.get_num_threads(), os.cpu_count() or 1, MAX_THREADS, len(work_items))
    if threads < 2 or threading.current_thread().name.startswith(THREAD_NAME_PREFIX):
        for item in work_items:
            work(item)
        return
    remaining = iter(work_items)  # over a list, so that `next` is atomic

    def drain() -> None:
        for item in remaining:
            work(item)

    with _pool_lock:
        pool = _pool()
    futures = [pool.submit(drain) for _ in range(threads)]
    wait(futures)
    for future in futures:
        future.result()


def thread_buffer(name: str, dtype: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
    """Return an uninitialized array of this thread, which reuses the memory of the last call with that name."""
    array: npt.NDArray[Any] | None = getattr(_local, name, None)
    if array is None or array.size < count or array.dtype != dtype:
        array = _allocate_aligned(dtype, count)
        setattr(_local, name, array)
    return array[:count]


def thread_buffer_like(name: str, dtype: npt.DTypeLike, other: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a thread buffer in the shape of another array."""
    return thread_buffer(name, dtype, other.size).reshape(other.shape)


def _allocate_aligned(dtype: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
    size = count * np.dtype(dtype).itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + size].view(dtype)


@cache
def _pool() -> ThreadPoolExecutor:
    """Start the workers, each with one torch thread.

    Torch keeps the number of threads per thread, but setting it also sets the default of threads to come. Therefore all
    workers start here, and afterwards the caller's own number is set again.
    """
    count = min(os.cpu_count() or 1, MAX_THREADS)
    threads = torch.get_num_threads()
    barrier = threading.Barrier(count)
    pool = ThreadPoolExecutor(count, THREAD_NAME_PREFIX, initializer=_use_one_torch_thread)
    wait([pool.submit(barrier.wait) for _ in range(count)])
    torch.set_num_threads(threads)
    return pool


def _use_one_torch_thread() -> None:
    torch.get_num_threads()  # the first call in a thread sets its number to the default
    torch.set_num_threads(1)

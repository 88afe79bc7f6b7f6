"""Return unused memory to the system: garbage in cycles, and memory freed by C code."""

import asyncio
import ctypes
import gc

TRIM_SECONDS = 15.0
M_ARENA_MAX = -8  # M_ARENA_MAX of glibc's malloc.h
_libc = ctypes.CDLL(None)
_is_glibc = hasattr(_libc, "malloc_trim")  # other C libraries do not need this or do not have it


def use_one_malloc_arena() -> None:
    """Let all threads allocate from one malloc arena. Call it before there are many threads.

    By default glibc has up to eight arenas per core, and one cannot reuse memory freed in another. A daemon then grows
    by 13 to 30 KB for every peer that returns, and with one arena by 2 KB (`benchmarks/returns.py`).
    """
    if _is_glibc:
        _libc.mallopt(M_ARENA_MAX, 1)


def enable_frequent_gc() -> None:
    """Collect garbage ten times as often. Call it once everything is imported and built.

    The existing objects are frozen, so a collection of the rest takes milliseconds. By default the cycles that gRPC and
    asyncio leave behind hold up to 30 MB for a quarter of an hour.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 1)
    gc.collect()  # a full collection waits for 25 % growth since the last one: now little


async def trim_periodically() -> None:
    """Trim the memory of this process every TRIM_SECONDS.

    Each round allocates and frees tens of megabytes in blocks of all sizes. glibc keeps free blocks between used ones,
    and their number grows from round to round. Failed calls leave frames in cycles, with the bytes they were sending;
    the collector counts cycles, and ignores how large they are.
    """
    while True:
        await asyncio.sleep(TRIM_SECONDS)
        await asyncio.to_thread(trim)


def trim() -> None:
    """Collect garbage and return free memory to the system; this takes milliseconds."""
    gc.collect()
    if _is_glibc:
        _libc.malloc_trim(0)

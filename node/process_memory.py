"""A daemon gives memory back that it no longer needs: what Python has lost sight of, and what C has freed."""

import asyncio
import ctypes
import gc

TRIM_SECONDS = 15.0
M_ARENA_MAX = -8  # M_ARENA_MAX of glibc's malloc.h
_libc = ctypes.CDLL(None)
_is_glibc = hasattr(_libc, "malloc_trim")  # others have no need of what follows, or no such thing


def use_one_malloc_arena() -> None:
    """To be called before threads are many. By default each gets memory from an arena of its own, up to eight a core.
    What is freed in one is of no use in another: a daemon takes 13 to 30 KB more with every peer that comes back,
    and with one arena 2 (`benchmarks/returns.py`).
    """
    if _is_glibc:
        _libc.mallopt(M_ARENA_MAX, 1)


def enable_frequent_gc() -> None:
    """To be called once all is imported and built: that is not looked at again, so that looking at the rest takes
    milliseconds and can be done ten times as often. By default the cycles that gRPC and asyncio leave behind hold up to
    30 MB for a quarter of an hour.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 1)
    gc.collect()  # the collector waits for a quarter more than the last time left: now that is little


async def trim_periodically() -> None:
    """Each round takes and frees tens of megabytes in pieces of all sizes. glibc keeps what lies between others that
    are in use, and round by round that becomes more. What failed leaves its frames behind in cycles, with the bytes
    that were on their way; the collector comes by when enough cycles are there, however large they are."""
    while True:
        await asyncio.sleep(TRIM_SECONDS)
        await asyncio.to_thread(trim)


def trim() -> None:
    """Takes milliseconds; what is needed again is got again."""
    gc.collect()
    if _is_glibc:
        _libc.malloc_trim(0)

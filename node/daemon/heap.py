"""The C library's heap, in a process that lives for months.

glibc opens an arena for every thread that finds the others taken, up to eight for each core, and what is free in one
serves no other: resident memory creeps for hours while the process holds no more than before. A daemon's threads have
little to allocate at the same time, and their large arrays are mapped, not taken from an arena; one serves them all.
"""

import ctypes
from typing import Final

M_ARENA_MAX: Final = -8  # glibc's malloc.h


def keep_one_arena() -> bool:
    """Before the first threads. Returns whether this C library knows of arenas; others have none to keep."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(M_ARENA_MAX, 1))

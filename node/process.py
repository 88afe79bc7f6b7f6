"""Tune this process: garbage collection at start-up, the limit of open files, and thread priorities.

With the default limit of 1024 descriptors, many viewers of the page would keep the node from its own files. When the
CPU is contended, work that a round waits for comes first, then the trainer, then the rest.
"""

import gc
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

RARE_GC_THRESHOLD = 200_000  # new objects between two collections


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Collect garbage rarely while modules are imported, and skip the objects that exist already.

    Imports leave almost no cycles, yet the collector would run about a hundred times, a sixth of a node's start-up.
    """
    threshold = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(RARE_GC_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()


MAX_FILE_DESCRIPTORS = 65_536  # used if the hard limit is infinite or higher


def raise_fd_limit() -> None:
    """Raise the limit of open files for this process and the processes that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = choose_fd_limit(soft, hard)
    if limit != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def choose_fd_limit(soft: int, hard: int) -> int:
    """Return the new soft limit, never less than the current one."""
    if soft == resource.RLIM_INFINITY:
        return soft
    return max(soft, MAX_FILE_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_FILE_DESCRIPTORS))


# On a CPU, a round's few milliseconds of work would otherwise wait for the many of an inner step, and in the end the
# trainer would wait for the round.
TRAINER_NICENESS = 5
LOW_PRIORITY_NICENESS = 10  # for work that nobody waits for


def lower_priority(niceness: int) -> None:
    """Increase the niceness of this thread and of the threads that it will start.

    Only Linux has a niceness per thread; on other systems this does nothing.
    """
    if sys.platform == "linux":
        os.nice(niceness)

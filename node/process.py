"""When Python's collector of cycles may rest.

How many files and connections this process may hold: as many as the system lets it, not the usual 1024.

Behind the usual limit a crowd at the page would keep the node from its own files.

Who goes first where all want the processors at once: what a round waits for, then the trainer, then the rest.
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
    """Modules that are being imported leave next to no cycles, and while a node's are, the collector would come some
    hundred times: a sixth of its start. What was there before is let be."""
    usual = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(RARE_GC_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


MAX_FILE_DESCRIPTORS = 65_536  # where the system sets no limit


def raise_fd_limit() -> None:
    """Also for the processes that are started from now on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = choose_fd_limit(soft, hard)
    if wanted != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def choose_fd_limit(soft: int, hard: int) -> int:
    """Never less than there is."""
    if soft == resource.RLIM_INFINITY:
        return soft
    return max(soft, MAX_FILE_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_FILE_DESCRIPTORS))


# Where the model is computed on the processors, a round's few milliseconds would each wait for an inner step's many,
# and in the end the trainer for the round.
TRAINER_NICENESS = 5
LOW_PRIORITY_NICENESS = 10  # what nobody waits for


def lower_priority(niceness: int) -> None:
    """From here on this thread, and those that it starts, come so far behind the other threads of a daemon.

    Elsewhere than on Linux a niceness is a whole process's: there all threads stay alike.
    """
    if sys.platform == "linux":
        os.nice(niceness)

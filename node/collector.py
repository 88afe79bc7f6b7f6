"""When Python's collector of cycles may rest."""

import gc
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

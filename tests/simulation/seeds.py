"""Many seeds one after the other; those that every change must pass come in halves, for two processes."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from tests.simulation.story import BrokenError, Story

SEEDS = 10_000
BATCH = 100
FIRST_HALF = range(0, SEEDS // 2, BATCH)
SECOND_HALF = range(SEEDS // 2, SEEDS, BATCH)
RARELY = 200_000  # new objects between two collections


@contextmanager
def rare_collections() -> Iterator[None]:
    """A third less time: what a story leaves is found some stories later, and what was there before is let be."""
    usual = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


def broken(first: int, count: int, isolating: bool) -> list[Story]:
    """The stories under these seeds in which something broke, each with its `fault`."""
    stories = []
    with rare_collections():
        for seed in range(first, first + count):
            story = Story(seed, isolating)
            try:
                story.run()
            except BrokenError:
                stories.append(story)
    return stories


def try_batch(first: int) -> None:
    """Whatever breaks is told event by event."""
    for story in broken(first, BATCH, isolating=False):
        story.print_trace()
        raise BrokenError(story.fault)

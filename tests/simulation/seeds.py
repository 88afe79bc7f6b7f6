"""Many seeds one after the other; those that every change must pass come in halves, for two processes."""

from node.collector import rare_collections
from tests.simulation.story import BrokenError, Story

SEEDS = 10_000
BATCH = 100
FIRST_HALF = range(0, SEEDS // 2, BATCH)
SECOND_HALF = range(SEEDS // 2, SEEDS, BATCH)


def broken(first: int, count: int, isolating: bool) -> list[Story]:
    """The stories under these seeds in which something broke, each with its `fault`."""
    stories = []
    # A third less time: what a story leaves is found some stories later.
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

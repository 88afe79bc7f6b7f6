"""Many seeds one after the other, in batches."""

from node.processes.process import rare_garbage_collection
from tests.simulation.liars import LIARS
from tests.simulation.seeded_run import InvariantError, SeededRun

SEEDS = 2_000  # ten thousand take `python -m tests.simulation.replay --seeds 10000`
BATCH = 50
BATCHES = range(0, SEEDS, BATCH)


def lies_of(seed: int) -> tuple[str, ...]:
    """Return the lies that peers may tell under a seed: under every second one all kinds."""
    return tuple(LIARS) if seed % 2 else ()


def broken_runs(first: int, count: int, isolating: bool) -> list[SeededRun]:
    """The stories under these seeds in which something broke, each with its `fault`."""
    stories = []
    # A third less time: what a story leaves is found some stories later.
    with rare_garbage_collection():
        for seed in range(first, first + count):
            story = SeededRun(seed, isolating, lies=() if isolating else lies_of(seed))
            try:
                story.run()
            except InvariantError:
                stories.append(story)
    return stories


def run_batch(first: int) -> None:
    """Whatever breaks is told event by event."""
    for story in broken_runs(first, BATCH, isolating=False):
        story.print_trace()
        raise InvariantError(story.fault)

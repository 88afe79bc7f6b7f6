"""Fetch the states of all stages of a pipeline at one round, from the peers and the hosts of the run.

The stages go on while their states travel, and none waits for us. So the first states tell how long a download takes,
and the next ones are those of a round that is a multiple of enough rounds: all stages pass it, one after another.
"""

import asyncio
import time
from pathlib import Path
from typing import Protocol, TypeVar

from node.daemon.checkpoints.trained_weights import TrainedWeights, load_trained_weights
from node.daemon.stored_states.stage_keepers import StageKeepers, gather_stages
from node.daemon.stored_states.state_keeper import MIN_BYTES_PER_SECOND, MIN_FETCH_SECONDS
from node.dashboard.observer_node import gossiping, open_node
from node.monitoring.progress import ByteProgress
from node.options import NodeOptions
from node.paths import newest_checkpoints
from node.run_dir import RunDir
from protocol.errors import UnreachableError
from protocol.tasks import cancel_and_wait

FIND_SECONDS = 45.0  # without a byte of a state
MOVING_TARGETS = 4  # states of each stage that may arrive before all are of one round
PROGRESS_SECONDS = 0.3

Result = TypeVar("Result")


class ByteCounter(Protocol):
    @property
    def bytes_received(self) -> int:
        """Return the bytes of states received by this process."""


async def show_progress(fetching: asyncio.Task[Result], counter: ByteCounter, size: int) -> Result:
    """Show how much of `size` bytes has arrived until the task ends, and return its result; cancel it if we are."""
    with ByteProgress("fetching the state", size) as progress:
        shown = 0
        try:
            while not (await asyncio.wait({fetching}, timeout=PROGRESS_SECONDS))[0]:
                received = min(counter.bytes_received, size)
                progress.advance(received - shown)
                shown = received
            return fetching.result()
        finally:
            await cancel_and_wait((fetching,))


async def fetch_stages(options: NodeOptions) -> TrainedWeights:
    """Return the weights of the whole model at a round that all stages have passed.

    Raises UnreachableError if no peer or host has them, or the states of no round come together.
    """
    folder, stages = RunDir(options.folder), range(options.manifest.pipeline.stages)
    options.folder.joinpath("run.toml").write_text(options.manifest.to_toml())
    async with open_node(options, folder) as node:
        keepers = gather_stages(node, folder, stages)
        await node.open()
        async with gossiping(node):
            fetching = asyncio.create_task(_fetch_common(keepers, options.folder))
            await show_progress(fetching, keepers, keepers.state_bytes)
    return await asyncio.to_thread(load_trained_weights, options.folder)


async def _fetch_common(keepers: StageKeepers, folder: Path) -> None:
    """Let the keepers fetch until the states of one round are there."""
    keeping = asyncio.create_task(keepers.run())
    limit = MOVING_TARGETS * (MIN_FETCH_SECONDS + keepers.state_bytes / MIN_BYTES_PER_SECOND)
    ends, stalls, received = time.monotonic() + limit, time.monotonic() + FIND_SECONDS, 0
    try:
        while not newest_checkpoints(folder):
            now = time.monotonic()
            if keepers.bytes_received != received:
                received, stalls = keepers.bytes_received, now + FIND_SECONDS
            if now > min(ends, stalls):
                raise UnreachableError(
                    f"the stages of the run do not come together ({keepers.describe()}); try again later"
                )
            await asyncio.wait({keeping}, timeout=PROGRESS_SECONDS)
            if keeping.done():
                await keeping
    finally:
        await cancel_and_wait((keeping,))

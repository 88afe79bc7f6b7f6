"""Strangers whose records alone are to decide exact steps: they announce that a step is void, or own microbatches."""

import asyncio
import itertools
import time

from tests.hostile.attackers.stranger import Stranger, open_together

PAUSE_SECONDS = 0.1
ANNOUNCE_SECONDS = 0.5  # less is a flood, whose cost to two cores hides that of the owners


async def void_records(stranger: Stranger) -> None:
    """Attack D: announce as an observer of each round in turn that a stage has decided it void."""
    await stranger.open()
    await stranger.meet()
    stranger.begin()
    for stage in itertools.cycle(range(stranger.manifest.pipeline.stages)):
        newest = max(record.round for record in (await stranger.meet()).values())
        stranger.directory.publish(
            urgent=True, role="trainer", stage=stage + 1, round=newest, step_decided=1 + 2 * newest
        )
        await asyncio.sleep(PAUSE_SECONDS)


async def announced_owners(stranger: Stranger) -> None:
    """Attack D: keys that only announce themselves as trainers own their share of each step, and begin nothing."""
    keys = stranger.with_others(int(stranger.options["keys"]))
    await open_together(keys)
    stranger.begin()
    lives = [int(time.time() * 1000)] * len(keys)
    while True:
        newest = max(record.round for record in (await stranger.meet()).values())
        for number, key in enumerate(keys):
            stage = number % stranger.manifest.pipeline.stages
            key.directory.publish(
                urgent=True, role="trainer", stage=stage + 1, stage_life=lives[number], stage_rate=1.0, round=newest
            )
        await asyncio.sleep(ANNOUNCE_SECONDS)

"""Find out whether a run is over, without taking part in it.

A node of its own looks, with a temporary key and folder. `murmur join` asks it when the text for training is missing:
somebody who comes too late should not look for it.
"""

import asyncio
import tempfile
import time
from pathlib import Path

from node.daemon.lifecycle import FinishedRun
from node.daemon.node import Node
from node.daemon.peers.swarm_view import find_newest_validation, states_at
from node.dashboard.observer_node import gossiping, open_observer_node
from node.loop.peers.swarm_snapshot import SwarmSnapshot
from node.loop.steering import Steering
from node.options import NodeOptions
from node.run_dir import RunDir
from protocol.consensus.chain import Chain

LOOK_SECONDS = 15.0
POLL_SECONDS = 0.2


async def find_end(settings: NodeOptions) -> FinishedRun | None:
    """Return the end of the run if most of its peers report it; None if it goes on, or nobody answers."""
    if not settings.contacts:
        return None
    with tempfile.TemporaryDirectory(prefix="murmur-") as folder:
        options = settings.model_copy(update={"folder": Path(folder)})
        async with open_observer_node(options, RunDir(options.folder), keeps=False) as (node, _), gossiping(node):
            return await _look(node)


async def _look(node: Node) -> FinishedRun | None:
    manifest = node.options.manifest
    stage = 0 if manifest.pipeline.is_cut else None  # the stages of a pipeline end together
    steering = Steering(manifest, Chain.from_genesis(manifest.run_id), node.revisions.log)
    began = time.monotonic()
    while time.monotonic() - began < LOOK_SECONDS:
        records = node.directory.live()
        snapshot = SwarmSnapshot(states_at(records, stage))
        final = steering.final_head(snapshot, node.peer_id)
        if final is not None:
            newest = find_newest_validation(records.values())
            loss = newest.validation_loss if newest else None
            return FinishedRun(final.round, final.tokens, loss, is_ours=False)
        if snapshot.trainers and steering.knows_all(snapshot):
            return None
        await asyncio.sleep(POLL_SECONDS)
    return None

"""Build the part of a replica that serves a stage: its activation memory, and the loop of server and owner."""

import random

from node.daemon.inbox import Inbox
from node.daemon.stages.activations import ActivationFetcher, ActivationStore, neighbour_runs, slot_sizes
from node.daemon.stages.stage_effects import NodeStages, StageEffects
from node.loop.stage_loop import build_stage_loop
from node.processes.workers import BackgroundTasks
from node.run_dir import RunDir
from node.trainer.ipc.activation_memory import ActivationMemory
from node.trainer.ipc.channel import StageConfig
from protocol.blobs.download import Downloader
from protocol.blobs.store import BlobStore
from protocol.manifest.run import Manifest
from protocol.pipeline.messages import first_serial
from protocol.pipeline.stage import StageManifest
from protocol.transport.transport import Transport


def build_stage(
    manifest: Manifest, run_dir: RunDir, node: NodeStages, transport: Transport, tasks: BackgroundTasks, inbox: Inbox
) -> StageEffects | None:
    """Build the stage of a manifest; None for the whole model. Raises StorageError or UsageError."""
    if not isinstance(manifest, StageManifest):
        return None
    me, sizes = node.directory.peer_id, slot_sizes(manifest)
    rng = random.Random(f"{me} {manifest.run_id}")
    record = node.records.record_of(manifest)
    loop = build_stage_loop(manifest, me, first_serial(node.directory.start), rng, draws=record.is_first)
    store = BlobStore(run_dir.activations, sizes.total_bytes, sizes.total_bytes)
    store.retain(())  # activations of an earlier process are useless
    activations = ActivationStore(ActivationMemory.create(sizes), store)
    downloader = Downloader(store, transport.bulk, rng)
    fetcher = ActivationFetcher(node.directory, node.blobs, downloader, activations, neighbour_runs(manifest))
    stage = StageEffects(loop, node, record, fetcher, transport.identity, tasks, inbox)
    node.add(manifest.run_id, stage)
    inbox.attach_stage(stage.handle)
    return stage


def stage_config(stage: StageEffects) -> StageConfig:
    """Return the settings that the trainer needs for its stage."""
    return StageConfig(stage=stage.loop.settings.stage, slots=stage.memory.sizes)

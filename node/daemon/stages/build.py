"""Build the part of a replica that serves a stage: its activation memory, and the loop of server and owner."""

import random

from node.daemon.inbox import Inbox
from node.daemon.stages.activations import ActivationFetcher, ActivationStore, slot_sizes
from node.daemon.stages.stage_effects import NodeStages, StageEffects
from node.loop.stage_loop import StageLoop
from node.loop.stage_modes import ExactMode, LocalMode
from node.processes.workers import BackgroundTasks
from node.run_dir import RunDir
from node.trainer.ipc.activation_memory import ActivationMemory
from node.trainer.ipc.channel import StageConfig
from protocol.blobs.download import Downloader
from protocol.blobs.store import BlobStore
from protocol.identity import PeerId
from protocol.manifest.run import Manifest
from protocol.pipeline.course import OwnerSettings
from protocol.pipeline.exact.settlement import Settlement
from protocol.pipeline.messages import first_serial
from protocol.pipeline.owner import Owner
from protocol.pipeline.stages.settings import StageSettings
from protocol.pipeline.stages.stage import StageManifest, stage_run_ids
from protocol.transport.transport import Transport

EXACT_PAUSE = 0.1  # seconds; in exact steps a server is asked at its own round only


def build_stage(
    manifest: Manifest, run_dir: RunDir, node: NodeStages, transport: Transport, tasks: BackgroundTasks, inbox: Inbox
) -> StageEffects | None:
    """Build it for the manifest of a stage; None for the whole model. Raises StorageError or UsageError.

    Activations never outlive the process.
    """
    if not isinstance(manifest, StageManifest):
        return None
    me, sizes = node.directory.peer_id, slot_sizes(manifest)
    rng = random.Random(f"{me} {manifest.run_id}")
    record = node.records.record_of(manifest)
    loop = build_loop(manifest, me, first_serial(node.directory.start), rng, draws=record.is_first)
    store = BlobStore(run_dir.activations, sizes.total_bytes, sizes.total_bytes)
    store.retain(())
    activations = ActivationStore(ActivationMemory.create(sizes), store)
    fetcher = ActivationFetcher(node.directory, node.blobs, Downloader(store, transport.bulk, rng), activations)
    stage = StageEffects(loop, node, record, fetcher, tasks, inbox)
    node.add(manifest.run_id, stage)
    inbox.attach_stage(stage.handle)
    return stage


def build_loop(manifest: StageManifest, me: PeerId, first: int, rng: random.Random, *, draws: bool) -> StageLoop:
    """Build the loop of a peer of a stage; `first` is the first serial of its process."""
    table, model = manifest.pipeline, manifest.model
    runs = stage_run_ids(manifest.whole_run_id, table.stages)
    settings = stage_settings(manifest)
    owner_settings = OwnerSettings(
        me,
        table.in_flight,
        needs_tokens=model.needs_tokens,
        activation_bytes=settings.activation_bytes,
        round_pause=EXACT_PAUSE if table.is_exact else 1.0,
    )
    mode = LocalMode()
    if table.is_exact:
        settlement = Settlement(me, runs, manifest.stage, settings.step_size)
        mode = ExactMode(settlement, manifest.stage, table.microbatch)
    return StageLoop(settings, Owner(owner_settings, runs, rng), mode, first, draws=draws)


def stage_settings(manifest: StageManifest) -> StageSettings:
    """Return the settings of the servers of a stage."""
    table, model, sizes = manifest.pipeline, manifest.model, slot_sizes(manifest)
    return StageSettings(
        run=manifest.run_id,
        stage=manifest.stage,
        stages=table.stages,
        activation_bytes=sizes.activation_bytes,
        token_bytes=sizes.token_bytes,
        step_size=manifest.train.batch_tokens // (table.microbatch * model.context),
        memory=table.memory,
        needs_tokens=model.needs_tokens,
    )


def stage_config(stage: StageEffects) -> StageConfig:
    """Return what the trainer must know of its stage."""
    return StageConfig(stage=stage.loop.settings.stage, slots=stage.memory.sizes)

"""Build the pipeline part of a replica: its activation memory, and the machines of stage and owner."""

import random

from node.ipc.activation_memory import ActivationMemory
from node.ipc.channel import StageConfig
from node.pipeline.activation_store import ActivationStore, slot_sizes
from node.pipeline.calls import StageCalls
from node.pipeline.pipeline import Pipeline, PipelineParts
from node.run_dir import RunDir
from node.workers import BackgroundTasks
from protocol.blobs.download import Downloader
from protocol.blobs.store import BlobStore
from protocol.manifest import Manifest
from protocol.membership.directory import PeerDirectory
from protocol.pipeline.owner import Owner
from protocol.pipeline.owner_events import OwnerSettings
from protocol.pipeline.stage import StageManifest, stage_run_ids
from protocol.pipeline.stage_settings import StageSettings
from protocol.transport.transport import Transport


def build_pipeline(
    manifest: Manifest, run_dir: RunDir, directory: PeerDirectory, transport: Transport, tasks: BackgroundTasks
) -> Pipeline | None:
    """Build it for the manifest of a stage; None for the whole model. Raises StorageError.

    Activations never outlive the process.
    """
    if not isinstance(manifest, StageManifest):
        return None
    table, model, sizes = manifest.pipeline, manifest.model, slot_sizes(manifest)
    runs = stage_run_ids(manifest.whole_run_id, table.stages)
    settings = StageSettings(
        run=manifest.run_id,
        stage=manifest.stage,
        stages=table.stages,
        activation_bytes=sizes.activation_bytes,
        token_bytes=sizes.token_bytes,
        step_size=manifest.train.batch_tokens // (table.microbatch * model.context),
        memory=table.memory,
    )
    store = BlobStore(run_dir.activations, sizes.total_bytes, sizes.total_bytes)
    store.retain(())
    rng = random.Random(f"{directory.peer_id} {manifest.run_id}")
    parts = PipelineParts(
        directory=directory,
        calls=StageCalls(transport),
        downloader=Downloader(store, transport.bulk, rng),
        activations=ActivationStore(ActivationMemory.create(sizes), store),
        background=tasks,
    )
    return Pipeline(settings, Owner(OwnerSettings(directory.peer_id, table.in_flight), runs, rng), parts)


def stage_config(pipeline: Pipeline) -> StageConfig:
    """Return what the trainer must know of its stage."""
    return StageConfig(stage=pipeline.settings.stage, slots=pipeline.memory.sizes)

"""Build the pipeline part of a replica: its activation memory, and the machines of stage and owner."""

import os
import random

from node.daemon.stages.activation_store import ActivationStore, slot_sizes
from node.daemon.stages.exact_pipeline import ExactPipeline
from node.daemon.stages.faulty_calls import stage_calls
from node.daemon.stages.node_stages import NodeStages
from node.daemon.stages.parts import PipelineParts
from node.daemon.stages.pipeline import Pipeline
from node.injected_faults import injected_faults
from node.processes.workers import BackgroundTasks
from node.run_dir import RunDir
from node.trainer.ipc.activation_memory import ActivationMemory
from node.trainer.ipc.channel import StageConfig
from protocol.blobs.download import Downloader
from protocol.blobs.store import BlobStore
from protocol.manifest.run import Manifest
from protocol.pipeline.course import OwnerSettings
from protocol.pipeline.exact.settlement import Settlement
from protocol.pipeline.owner import Owner
from protocol.pipeline.stages.settings import StageSettings
from protocol.pipeline.stages.stage import StageManifest, stage_run_ids
from protocol.transport.transport import Transport

EXACT_PAUSE = 0.1  # seconds; in exact steps, every server is asked at its own round only


def build_pipeline(
    manifest: Manifest, run_dir: RunDir, node: NodeStages, transport: Transport, tasks: BackgroundTasks
) -> Pipeline | None:
    """Build it for the manifest of a stage; None for the whole model. Raises StorageError or UsageError.

    Activations never outlive the process.
    """
    faults = injected_faults(os.environ, manifest.run.name)
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
        needs_tokens=model.needs_tokens,
    )
    store = BlobStore(run_dir.activations, sizes.total_bytes, sizes.total_bytes)
    store.retain(())
    me = node.directory.peer_id
    rng = random.Random(f"{me} {manifest.run_id}")
    parts = PipelineParts(
        node=node,
        board=node.board_of(manifest),
        calls=stage_calls(transport, faults),
        downloader=Downloader(store, transport.bulk, rng),
        activations=ActivationStore(ActivationMemory.create(sizes), store),
        background=tasks,
    )
    owner_settings = OwnerSettings(
        me,
        table.in_flight,
        needs_tokens=model.needs_tokens,
        activation_bytes=sizes.activation_bytes,
        round_pause=EXACT_PAUSE if table.is_exact else 1.0,
    )
    owner = Owner(owner_settings, runs, rng)
    pipeline: Pipeline
    if table.is_exact:
        settlement = Settlement(me, runs, manifest.stage, settings.step_size)
        pipeline = ExactPipeline(settings, owner, parts, settlement, table.microbatch)
    else:
        pipeline = Pipeline(settings, owner, parts)
    node.add(manifest.run_id, pipeline)
    return pipeline


def stage_config(pipeline: Pipeline) -> StageConfig:
    """Return what the trainer must know of its stage."""
    return StageConfig(stage=pipeline.settings.stage, slots=pipeline.memory.sizes)

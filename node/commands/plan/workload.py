"""Compute the cost of a microbatch and a round at each stage, from the manifest alone."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from node.daemon.run_limits import peer_bytes
from node.from_manifest import build_program
from node.model import Cut, all_cuts, shape_table
from node.model.families import model_family
from node.model.memory_estimate import PROCESS_BYTES, fixed_bytes, microbatch_bytes, run_microbatch
from node.model.shapes import deal_blocks
from optim.method import Method
from optim.round_plan import RoundPlanner
from protocol.manifest.run import Manifest
from protocol.pipeline.microbatch_table import RESERVED_SHARE

PASSES_OF_STAGE = 4  # forward, the same again in the backward pass, and a backward pass of twice a forward
PASSES_OF_WHOLE = 3  # without the recomputation
FORWARD_SHARE = 1 - RESERVED_SHARE
MAX_PLANNED_ROUNDS = 64


@dataclass(frozen=True)
class StageWork:
    """One stage. A microbatch of a run with one stage is one sequence.

    Args:
        flops: operations of a microbatch, both passes.
        sent_bytes: activations and gradients that its peers upload for a microbatch; as many as they download.
        message_bytes: mean size of a contribution.
        held: microbatches between their two passes that fit into `pipeline.memory` of a peer; 0 without a pipeline.
        memory: bytes that a machine needs, by kind of device.
    """

    stage: int
    layers: int
    parameters: int
    flops: float
    sent_bytes: float
    message_bytes: float
    held: int
    memory: dict[str, float]


@dataclass(frozen=True)
class Workload:
    """A run. `step_microbatches` make up an inner step of a peer, `steps` inner steps a round."""

    manifest: Manifest
    method: Method
    stages: tuple[StageWork, ...]
    step_microbatches: int
    steps: float
    activation_bytes: float

    @property
    def is_cut(self) -> bool:
        return len(self.stages) > 1


def workload_of(manifest: Manifest) -> Workload:
    """Compute the work of a run. Raises ManifestError if its method does not fit the model."""
    table, context = manifest.pipeline, manifest.model.context
    sequences = table.microbatch if table.is_cut else 1
    planner = build_program(manifest, cut=all_cuts(table.stages)[0])
    rounds = _settled_rounds(planner)
    return Workload(
        manifest,
        planner.method.at_round(rounds[0]),
        tuple(_stages_of(manifest)),
        manifest.train.batch_tokens // (sequences * context),
        sum(planner.plan(number).steps for number in rounds) / len(rounds),
        _activation_bytes(manifest),
    )


def _activation_bytes(manifest: Manifest) -> float:
    if not manifest.pipeline.is_cut:
        return 0.0
    return float(manifest.pipeline.activation_bytes(manifest.model.context, manifest.model.stream_width))


def _stages_of(manifest: Manifest) -> Iterator[StageWork]:
    """Yield the work of all stages; those with equal blocks are computed once, as there may be many of them."""
    stages = manifest.pipeline.stages
    known: dict[tuple[int, bool, bool], StageWork] = {}
    ranges = deal_blocks(model_family(manifest.model).block_work(manifest.model), stages)
    for cut, numbers in zip(all_cuts(stages), ranges, strict=True):
        kind = (len(numbers), cut.has_embedding, cut.has_head)
        if kind not in known:
            known[kind] = _stage_work(manifest, cut)
        yield replace(known[kind], stage=cut.stage)


def _stage_work(manifest: Manifest, cut: Cut) -> StageWork:
    planner, activation = build_program(manifest, cut=cut), _activation_bytes(manifest)
    sequences = manifest.pipeline.microbatch if cut.stages > 1 else 1
    neighbours = (not cut.has_embedding) + (not cut.has_head)
    passes = PASSES_OF_STAGE if cut.stages > 1 else PASSES_OF_WHOLE
    numbers = model_family(manifest.model).block_range(manifest.model, cut)
    rounds = _settled_rounds(planner)
    return StageWork(
        stage=cut.stage,
        layers=len(numbers) - cut.has_embedding - cut.has_head,
        parameters=shape_table(manifest.model, cut).numel,
        flops=passes * sequences * forward_flops(manifest, cut),
        sent_bytes=neighbours * activation,
        message_bytes=sum(sum(planner.plan(number).max_sizes) for number in rounds) / len(rounds),
        held=int(FORWARD_SHARE * manifest.pipeline.memory / (neighbours * activation)) if activation else 0,
        memory=dict(_memory_by_device(manifest, cut)),
    )


def forward_flops(manifest: Manifest, cut: Cut) -> float:
    """Return the operations of a forward pass of one sequence of T tokens through a stage.

    A matrix takes 2 T operations an element, the attention of a layer 4 T^2 times the width of its heads (scores and
    values, as if without a mask). Looking up an embedding, norms and gates are left out.
    """
    model = manifest.model
    family = model_family(model)
    numbers, work = family.block_range(model, cut), family.block_work(model)
    elements = math.fsum(work[number] for number in numbers)
    layers = len(numbers) - cut.has_embedding - cut.has_head
    return 2.0 * model.context * elements + 4.0 * model.context**2 * model.head_width * model.heads * layers


def _memory_by_device(manifest: Manifest, cut: Cut) -> Iterator[tuple[str, float]]:
    """Yield what training needs of the device; on a CPU the daemon and the activations share its memory."""
    sequences = run_microbatch(manifest)[1]
    yield "cuda", float(fixed_bytes(manifest, "cuda", cut) + microbatch_bytes(manifest, sequences, "cuda", cut))
    yield "cpu", float(PROCESS_BYTES + peer_bytes(manifest, build_program(manifest, cut=cut), "cpu", cut))


def _settled_rounds(planner: RoundPlanner) -> list[int]:
    return list(itertools.islice(planner.cycle, MAX_PLANNED_ROUNDS))

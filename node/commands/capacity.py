"""What a run takes of this machine and how fast a peer trains, before anything is downloaded or allocated.

The writer of a manifest chooses the size of the model and the number of checkpoints. A run that needs more memory than
is free is refused with the numbers. A downloaded manifest that would take more than half of the free memory or disk is
a question to the person; `--memory` and `--disk` answer it beforehand.
"""

import itertools
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from node.commands.doctor.checks import free_memory
from node.commands.join.consent import require_consent
from node.commands.plan.arithmetic import StageCost, Workload
from node.daemon.run_limits import TEMPORARY_BYTES, host_bytes, peer_bytes, trainer_bytes
from node.daemon.state.outer_state import outer_file_bytes, state_bytes
from node.disk_budget import folder_bytes
from node.from_manifest import build_node_program, build_program, in_memory_mode
from node.model import Cut, cuts_of, model_family, shape_table, smallest_cut
from node.model.generate import cache_bytes
from node.model.interface import Recompute
from node.model.memory_estimate import (
    PROCESS_BYTES,
    adapted_bytes,
    fixed_bytes,
    max_microbatch,
    microbatch_bytes,
    run_microbatch,
)
from node.model.shapes import deal_blocks
from node.options import NodeOptions
from node.trainer.devices.device import choose_devices, uses_bf16
from node.trainer.ipc.shared_memory import SharedLayout
from node.units import format_bytes, format_count
from optim.round_plan import RoundPlanner
from protocol.errors import DeviceError, ManifestError, StorageError
from protocol.manifest.run import Manifest
from protocol.pipeline.microbatch_table import RESERVED_SHARE

TRAINER_BYTES_PER_PARAMETER = 16  # in a checkpoint: moments, weights and the waiting contribution
MIN_STATES = 2  # in the store of blobs: the newest one and its predecessor
PASSES = 3  # a backward pass computes twice as much as a forward pass
DAEMON_PROCESS_BYTES = 280_000_000  # without a model
MATRIX_SIDE = 1024
FLOAT_BYTES = 4
ROLLOUT_TEXTS = 64  # that a rollout peer writes together
MEASURED_SECONDS = 0.3
PASSES_OF_STAGE = 4  # forward, the same again in the backward pass, and a backward pass of twice a forward
CARD_BLOCK_SECONDS = 1e-3  # to launch the kernels of a block, forward and backward, in eager mode: small models wait
FORWARD_SHARE = 1 - RESERVED_SHARE
MAX_PLANNED_ROUNDS = 64


@dataclass(frozen=True)
class Needs:
    """Bytes of main memory and of disk."""

    memory: int
    disk: int


def estimate_needs(manifest: Manifest, device: str, ranks: int = 1) -> Needs:
    """Estimate what a run takes of a machine in the memory mode of the manifest.

    `device` is "cpu", "cuda" or "mps", and `ranks` of them train together.
    """
    parameters = shape_table(manifest.model, smallest_cut(manifest)).numel
    planner = build_node_program(manifest, None, cut=smallest_cut(manifest))
    memory = PROCESS_BYTES + peer_bytes(manifest, planner, device, smallest_cut(manifest))
    if device == "cpu" and ranks > 1:
        rank = fixed_bytes(manifest, device, ranks=ranks) + microbatch_bytes(manifest, 1, device)
        memory = host_bytes(planner) + ranks * rank
    state = state_bytes(parameters, planner.method)
    checkpoint = state + parameters * TRAINER_BYTES_PER_PARAMETER
    files = SharedLayout.of(planner).file_bytes + outer_file_bytes(planner)
    return Needs(memory, (manifest.checkpoint.keep + 1) * checkpoint + MIN_STATES * state + files)


def small_memory(manifest: Manifest, device: str) -> int | None:
    """Return the memory that a run takes with `--memory-mode small`; None if that is its mode, or it allows none."""
    if manifest.train.memory == "small":
        return None
    try:
        return estimate_needs(in_memory_mode(manifest, "small"), device).memory
    except ManifestError:
        return None


def smaller_mode(small: int | None, free: float) -> str:
    """Return the advice to use less memory, if that much fits into what is free; else an empty text."""
    if small is None or small > free:
        return ""
    return f"add --memory-mode small, which takes {format_bytes(small)}, or "


def available_capacity(folder: Path) -> Needs:
    """Return the free memory, and the disk space that a node's folder has and may take."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return Needs(free_memory(), shutil.disk_usage(existing).free + folder_bytes(folder))


def require_capacity(settings: NodeOptions, is_downloaded: bool) -> None:
    """Refuse a run that does not fit into this machine, and ask about one that fills most of it.

    Raises DeviceError, StorageError, or UsageError if nobody can be asked.
    """
    manifest, devices = in_memory_mode(settings.manifest, settings.memory_mode), choose_devices(settings)
    kind, ranks = devices[0].type, len(devices)
    needed, small = estimate_needs(manifest, kind, ranks), small_memory(manifest, kind) if ranks == 1 else None
    check_capacity(needed, available_capacity(settings.folder), settings, is_downloaded, small)


def require_rollout_capacity(settings: NodeOptions, is_downloaded: bool) -> None:
    """Compare the needs of a rollout peer with this machine; raises as `require_capacity` does."""
    needed = estimate_rollout_needs(settings.manifest)
    check_capacity(needed, available_capacity(settings.folder), settings, is_downloaded)


def estimate_rollout_needs(manifest: Manifest) -> Needs:
    """Estimate the needs of a rollout peer: no gradient, no moments, and no vectors shared with a trainer.

    Its generator holds the weights, and keys and values of a batch. Its daemon computes the next state while the
    present one is a file, and decodes one contribution after the other.
    """
    planner, model = build_node_program(manifest, None), manifest.model
    state = state_bytes(planner.numel, planner.method)
    follower = state + TEMPORARY_BYTES * planner.numel
    generator = (
        2 * FLOAT_BYTES * planner.numel + adapted_bytes(manifest) + cache_bytes(model, ROLLOUT_TEXTS, model.context)
    )
    disk = (manifest.checkpoint.keep + 1 + MIN_STATES) * state
    return Needs(PROCESS_BYTES + DAEMON_PROCESS_BYTES + generator + follower, disk)


def check_capacity(
    needed: Needs, available: Needs, settings: NodeOptions, is_downloaded: bool, small: int | None = None
) -> None:
    """Compare the needs of a run with this machine. Raises as `require_capacity` does.

    `small`: the memory that it would need in the other mode, if it can.
    """
    if needed.memory > available.memory:
        raise DeviceError(
            f"the run needs about {format_bytes(needed.memory)} of memory, but {format_bytes(available.memory)} are "
            f"free; {smaller_mode(small, available.memory)}close other programs, use a larger "
            "machine, or join a smaller run"
        )
    disk = available.disk if settings.disk is None else min(settings.disk, available.disk)
    if needed.disk > disk:
        raise StorageError(
            f"the run needs about {format_bytes(needed.disk)} of disk space, but may take {format_bytes(disk)}; "
            "free some space, allow more by --disk, or choose another --dir"
        )
    if is_downloaded and settings.memory is None and 2 * needed.memory > available.memory:
        require_consent(
            f"This run needs about {format_bytes(needed.memory)} of memory; {format_bytes(available.memory)} are free.",
            "--memory SIZE",
        )
    if is_downloaded and settings.disk is None and 2 * needed.disk > available.disk:
        require_consent(
            f"This run needs about {format_bytes(needed.disk)} of disk space; {format_bytes(available.disk)} are free.",
            "--disk SIZE",
        )


@dataclass(frozen=True)
class PeerEstimate:
    """The needs of one peer: bytes of main memory and of an accelerator, sequences of a microbatch, tokens a second.

    `small_bytes` is the main memory with `--memory-mode small`; None if that is the mode, or the run does not allow it.
    `device_bytes` are those of each accelerator; None on a CPU, whose memory is the main memory. The speed is that of
    the matrix products alone, so the trainer does not reach it.
    """

    parameters: int
    ranks: int
    main_bytes: int
    small_bytes: int | None
    device_bytes: int | None
    microbatch: int
    wanted_microbatch: int
    tokens_per_second: float

    def lines(self, peers: int, free_main: int) -> Iterator[str]:
        """Yield lines for a person about a number of peers on this machine."""
        yield f"{format_count(self.parameters)} parameters; {peers} on this machine take up to"
        yield f"main memory: {format_bytes(peers * self.main_bytes)} of {format_bytes(free_main)} free"
        if self.small_bytes is not None:
            yield f"with --memory-mode small: {format_bytes(peers * self.small_bytes)}"
        if self.device_bytes is not None:
            each = "accelerator" if self.ranks == 1 else f"each of {self.ranks} accelerators"
            yield f"{each}: {format_bytes(peers * self.device_bytes)}"
        yield f"microbatches: {self.microbatch} sequences fit, the run's have {self.wanted_microbatch}"
        yield f"speed: at most {format_count(int(self.tokens_per_second))} tokens a second"

    def require_memory(self, peers: int, free_main: int) -> None:
        """Raise DeviceError if that many peers do not fit into the free memory."""
        needed = peers * self.main_bytes
        if needed > free_main:
            small = None if self.small_bytes is None else peers * self.small_bytes
            raise DeviceError(
                f"{peers} peers of this run take {format_bytes(needed)} of memory, but {format_bytes(free_main)} are "
                f"free; {smaller_mode(small, free_main)}start fewer with --peers, close other programs, or use a "
                "smaller model"
            )


def estimate_peer(
    manifest: Manifest,
    device: str,
    free_device: float,
    flops: float,
    recompute: Recompute = "none",
    ranks: int = 1,
) -> PeerEstimate:
    """Predict the needs of one peer on "cpu" or "cuda", in the memory mode of the manifest.

    Args:
        manifest: the run.
        device: the kind of device.
        free_device: bytes of it that are free; on a CPU, of main memory.
        flops: floating-point operations a second of matrix products.
        recompute: what layers keep for the backward pass.
        ranks: devices that train together.
    """
    cut, small = smallest_cut(manifest), small_memory(manifest, device) if ranks == 1 else None
    wanted = run_microbatch(manifest)[0]
    activations = microbatch_bytes(manifest, wanted, device, recompute=recompute)
    on_device = fixed_bytes(manifest, device, ranks=ranks) + activations
    if device == "cpu" and ranks == 1:
        planner = build_node_program(manifest, None, cut=cut)
        free_device = trainer_bytes(manifest, planner, int(free_device) - DAEMON_PROCESS_BYTES, cut)
    return PeerEstimate(
        parameters=shape_table(manifest.model, cut).numel,
        ranks=ranks,
        main_bytes=estimate_needs(manifest, device, ranks).memory + DAEMON_PROCESS_BYTES,
        small_bytes=None if small is None else small + DAEMON_PROCESS_BYTES,
        device_bytes=on_device if device == "cuda" else None,
        microbatch=max_microbatch(manifest, free_device, device, recompute, ranks),
        wanted_microbatch=wanted,
        tokens_per_second=manifest.model.context * ranks * flops / (PASSES * forward_flops(manifest, cut)),
    )


def measure_flops(device: torch.device) -> float:
    """Measure the floating-point operations a second of matrix products on a device, as a trainer computes them."""
    dtype = torch.bfloat16 if uses_bf16(device) else torch.float32
    matrix = torch.ones(MATRIX_SIDE, MATRIX_SIDE, device=device, dtype=dtype)
    count, began = 0, time.perf_counter()
    while (seconds := time.perf_counter() - began) < MEASURED_SECONDS or count < 2:
        (matrix @ matrix)[0, 0].item()
        count += 1
    return 2 * MATRIX_SIDE**3 * count / seconds


def workload_of(manifest: Manifest) -> Workload:
    """Compute the work of a run. Raises ManifestError if its method does not fit the model."""
    table, context = manifest.pipeline, manifest.model.context
    sequences = table.microbatch if table.is_cut else 1
    planner = build_program(manifest, cut=cuts_of(manifest)[0])
    rounds = _settled_rounds(planner)
    settled = planner.method.at_round(rounds[0])
    return Workload(
        manifest,
        settled.topology,
        settled.schedule.ahead,
        tuple(_stages_of(manifest)),
        manifest.train.batch_tokens // (sequences * context),
        sum(planner.plan(number).steps for number in rounds) / len(rounds),
        _activation_bytes(manifest),
        shape_table(manifest.model).numel,
        None if manifest.rl is None else estimate_rollout_needs(manifest).memory,
    )


def _activation_bytes(manifest: Manifest) -> float:
    if not manifest.pipeline.is_cut:
        return 0.0
    return float(manifest.pipeline.activation_bytes(manifest.model.context, manifest.model.stream_width))


def _stages_of(manifest: Manifest) -> Iterator[StageCost]:
    """Yield the work of all stages; those with equal blocks are computed once, as there may be many of them."""
    table = manifest.pipeline
    known: dict[tuple[int, bool, bool], StageCost] = {}
    ranges = deal_blocks(model_family(manifest.model).block_work(manifest.model), table.stages, table.speeds)
    for cut, numbers in zip(cuts_of(manifest), ranges, strict=True):
        kind = (len(numbers), cut.has_embedding, cut.has_head)
        if kind not in known:
            known[kind] = _stage_work(manifest, cut)
        yield replace(known[kind], stage=cut.stage)


def _stage_work(manifest: Manifest, cut: Cut) -> StageCost:
    planner, activation = build_program(manifest, cut=cut), _activation_bytes(manifest)
    sequences = manifest.pipeline.microbatch if cut.stages > 1 else 1
    neighbours = (not cut.has_embedding) + (not cut.has_head)
    passes = PASSES_OF_STAGE if cut.stages > 1 else PASSES
    numbers = model_family(manifest.model).block_range(manifest.model, cut)
    rounds = _settled_rounds(planner)
    return StageCost(
        stage=cut.stage,
        layers=len(numbers) - cut.has_embedding - cut.has_head,
        parameters=shape_table(manifest.model, cut).numel,
        flops=passes * sequences * forward_flops(manifest, cut),
        sent_bytes=neighbours * activation,
        message_bytes=sum(sum(planner.plan(number).max_sizes) for number in rounds) / len(rounds),
        held=int(FORWARD_SHARE * manifest.pipeline.memory / (neighbours * activation)) if activation else 0,
        memory=dict(_memory_by_device(manifest, cut)),
        launch_seconds=_launch_seconds(manifest, len(numbers)) if cut.stages == 1 else 0.0,
    )


def _launch_seconds(manifest: Manifest, blocks: int) -> float:
    """Return the share of one sequence in the time to launch the kernels of a pass."""
    sequences = min(manifest.train.microbatch, manifest.train.batch_tokens // manifest.model.context)
    return CARD_BLOCK_SECONDS * blocks / sequences


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

"""Predict what a peer takes of this machine and how fast it trains, before anything is downloaded or allocated."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from node.commands.join.room import needed_room, small_memory, smaller_mode
from node.commands.plan.workload import forward_flops
from node.daemon.run_limits import trainer_bytes
from node.from_manifest import build_node_program
from node.model import shape_table, smallest_cut
from node.model.interface import Recompute
from node.model.memory_estimate import fixed_bytes, max_microbatch, microbatch_bytes, run_microbatch
from node.trainer.devices.device import uses_bf16
from node.units import format_bytes, format_count
from protocol.errors import DeviceError
from protocol.manifest.run import Manifest

PASSES = 3  # a backward pass computes twice as much as a forward pass
DAEMON_PROCESS_BYTES = 280_000_000  # without a model
MATRIX_SIDE = 1024
MEASURED_SECONDS = 0.3


@dataclass(frozen=True)
class Prediction:
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

    def require_room(self, peers: int, free_main: int) -> None:
        """Raise DeviceError if that many peers do not fit into the free memory."""
        needed = peers * self.main_bytes
        if needed > free_main:
            small = None if self.small_bytes is None else peers * self.small_bytes
            raise DeviceError(
                f"{peers} peers of this run take {format_bytes(needed)} of memory, but {format_bytes(free_main)} are "
                f"free; {smaller_mode(small, free_main)}start fewer with --peers, close other programs, or use a "
                "smaller model"
            )


def predict(
    manifest: Manifest,
    device: str,
    free_device: float,
    flops: float,
    recompute: Recompute = "none",
    ranks: int = 1,
) -> Prediction:
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
    return Prediction(
        parameters=shape_table(manifest.model, cut).numel,
        ranks=ranks,
        main_bytes=needed_room(manifest, device, ranks).memory + DAEMON_PROCESS_BYTES,
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

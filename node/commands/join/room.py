"""Check whether a run fits into this machine, before anything is allocated.

The writer of a manifest chooses the size of the model and the number of checkpoints. A run that needs more memory than
is free is refused with the numbers. A downloaded manifest that would take more than half of the free memory or disk is
a question to the person; `--memory` and `--disk` answer it beforehand.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from node.commands.doctor.machine import free_memory
from node.commands.join.consent import require_consent
from node.daemon.run_limits import host_bytes, peer_bytes
from node.daemon.state.outer_state import outer_file_bytes, state_bytes
from node.disk_budget import folder_bytes
from node.from_manifest import build_node_program, in_memory_mode
from node.model import shape_table, smallest_cut
from node.model.memory_estimate import PROCESS_BYTES, fixed_bytes, microbatch_bytes
from node.options import NodeOptions
from node.trainer.devices.device import choose_devices
from node.trainer.ipc.shared_memory import SharedLayout
from node.units import format_bytes
from protocol.errors import DeviceError, ManifestError, StorageError
from protocol.manifest.run import Manifest

TRAINER_BYTES_PER_PARAMETER = 16  # in a checkpoint: moments, weights and the waiting contribution
MIN_STATES = 2  # in the store of blobs: the newest one and its predecessor


@dataclass(frozen=True)
class Room:
    """Bytes of main memory and of disk."""

    memory: int
    disk: int


def needed_room(manifest: Manifest, device: str, ranks: int = 1) -> Room:
    """Estimate what a run takes of a machine in the memory mode of the manifest.

    `device` is "cpu" or "cuda", and `ranks` of them train together.
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
    return Room(memory, (manifest.checkpoint.keep + 1) * checkpoint + MIN_STATES * state + files)


def small_memory(manifest: Manifest, device: str) -> int | None:
    """Return the memory that a run takes with `--memory-mode small`; None if that is its mode, or it allows none."""
    if manifest.train.memory == "small":
        return None
    try:
        return needed_room(in_memory_mode(manifest, "small"), device).memory
    except ManifestError:
        return None


def smaller_mode(small: int | None, free: float) -> str:
    """Return the advice to use less memory, if that much fits into what is free; else an empty text."""
    if small is None or small > free:
        return ""
    return f"add --memory-mode small, which takes {format_bytes(small)}, or "


def available_room(folder: Path) -> Room:
    """Return the free memory, and the disk space that a node's folder has and may take."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return Room(free_memory(), shutil.disk_usage(existing).free + folder_bytes(folder))


def require_room(settings: NodeOptions, is_downloaded: bool) -> None:
    """Refuse a run that does not fit into this machine, and ask about one that fills most of it.

    Raises DeviceError, StorageError, or UsageError if nobody can be asked.
    """
    manifest, devices = in_memory_mode(settings.manifest, settings.memory_mode), choose_devices(settings)
    kind, ranks = devices[0].type, len(devices)
    needed, small = needed_room(manifest, kind, ranks), small_memory(manifest, kind) if ranks == 1 else None
    check_room(needed, available_room(settings.folder), settings, is_downloaded, small)


def check_room(
    needed: Room, available: Room, settings: NodeOptions, is_downloaded: bool, small: int | None = None
) -> None:
    """Compare the needs of a run with what there is. Raises as `require_room` does.

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

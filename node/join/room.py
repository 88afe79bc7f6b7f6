"""Check whether a run fits into this machine, before anything is allocated.

Whoever writes a manifest chooses the size of the model and the number of checkpoints. A run that needs more memory than
is free is refused with the numbers. A downloaded manifest that would take more than half of the free memory or disk is
a question to the person; `--memory` and `--disk` answer it beforehand.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from node.daemon.outer_state import state_bytes
from node.disk_budget import folder_bytes
from node.doctor.machine import DAEMON_BYTES_PER_PARAMETER, free_memory
from node.from_manifest import build_program
from node.join.consent import require_consent
from node.model import shape_table, smallest_cut
from node.model.memory_estimate import fixed_bytes, sequence_bytes
from node.options import NodeOptions
from node.trainer.device import choose_device
from node.units import format_bytes
from protocol.errors import DeviceError, StorageError
from protocol.manifest import Manifest

TRAINER_BYTES_PER_PARAMETER = 16  # in a checkpoint: moments, weights and the waiting contribution
MIN_STATES = 2  # in the store of blobs: the newest one and its predecessor


@dataclass(frozen=True)
class Room:
    """Bytes of main memory and of disk."""

    memory: int
    disk: int


def needed_room(manifest: Manifest, device: str) -> Room:
    """Estimate what a run takes of a machine; `device` is "cpu" or "cuda"."""
    parameters = shape_table(manifest.model, smallest_cut(manifest)).numel
    memory = parameters * DAEMON_BYTES_PER_PARAMETER + manifest.pipeline.is_cut * manifest.pipeline.memory
    if device == "cpu":
        memory += fixed_bytes(manifest, device) + sequence_bytes(manifest, device)
    state = state_bytes(parameters, build_program(manifest).method)
    checkpoint = state + parameters * TRAINER_BYTES_PER_PARAMETER
    return Room(memory, (manifest.checkpoint.keep + 1) * checkpoint + MIN_STATES * state)


def available_room(folder: Path) -> Room:
    """Return the free memory, and the disk space that a node's folder has and may take."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return Room(free_memory(), shutil.disk_usage(existing).free + folder_bytes(folder))


def require_room(settings: NodeOptions, is_downloaded: bool) -> None:
    """Refuse a run that does not fit into this machine, and ask about one that fills most of it.

    Raises DeviceError, StorageError, or UsageError if nobody can be asked.
    """
    needed = needed_room(settings.manifest, choose_device(settings.device).type)
    check_room(needed, available_room(settings.folder), settings, is_downloaded)


def check_room(needed: Room, available: Room, settings: NodeOptions, is_downloaded: bool) -> None:
    """Compare the needs of a run with what there is. Raises as `require_room` does."""
    if needed.memory > available.memory:
        raise DeviceError(
            f"the run needs about {format_bytes(needed.memory)} of memory, but {format_bytes(available.memory)} are "
            "free; close other programs, use a larger machine, or join a smaller run"
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

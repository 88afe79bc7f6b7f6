"""The disk budget of a node's folder: checkpoints, blobs and logs together.

The store of blobs has half of it at most, the checkpointer keeps fewer checkpoints rather than exceed it, and a node
whose folder exceeds it nevertheless ends before it fills the disk of its owner.
"""

import asyncio
import os
import shutil
from pathlib import Path

from node.units import format_bytes
from protocol.errors import StorageError

CHECK_SECONDS = 15.0
SHARE_OF_FREE_SPACE = 0.5  # by default
SHARE_FOR_OTHERS = 0.25  # of the budget, for states that a node keeps only in case others lose them


def folder_bytes(folder: Path) -> int:
    """Return the disk space that the files of a folder take; links are not followed."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except FileNotFoundError:
                continue  # removed meanwhile
    return total


def choose_budget(folder: Path, allowed: int | None) -> int:
    """Return the bytes that the folder may take: as allowed, or half of the space that it could have."""
    if allowed is not None:
        return allowed
    return int(SHARE_OF_FREE_SPACE * (shutil.disk_usage(folder).free + folder_bytes(folder)))


def checkpoints_within(budget: int, used: int, stored: int, newest: int, keep: int) -> int:
    """Return how many checkpoints to keep: `keep`, or as many of the size of the newest as fit, but always one.

    Args:
        used: bytes of the whole folder.
        stored: bytes of its checkpoints.
        newest: bytes of one checkpoint.
    """
    room = budget - (used - stored)
    return max(1, min(keep, room // max(1, newest) - 1))  # one more exists while it is written


class DiskRoom:
    """The disk that a node's folder may take for states that it keeps for others: a share of its budget."""

    def __init__(self, folder: Path, budget: int) -> None:
        self._folder = folder
        self._budget = budget

    async def require(self, size: int) -> None:
        """Raise StorageError unless `size` more bytes fit, and leave most of the budget to the node's own work."""
        used = await asyncio.to_thread(folder_bytes, self._folder)
        if used + size > self._budget or size > SHARE_FOR_OTHERS * self._budget:
            raise StorageError(
                f"it may need {format_bytes(size)}, but {self._folder} has {format_bytes(used)} and may take "
                f"{format_bytes(self._budget)}, {SHARE_FOR_OTHERS:.0%} of it for others; allow more by --disk"
            )


async def watch_budget(folder: Path, budget: int) -> None:
    """Check the folder until it exceeds its budget. Raises StorageError then."""
    while True:
        used = await asyncio.to_thread(folder_bytes, folder)
        if used > budget:
            raise StorageError(
                f"{folder} has {format_bytes(used)} on disk, and this node may take {format_bytes(budget)}; "
                "allow more by --disk"
            )
        await asyncio.sleep(CHECK_SECONDS)

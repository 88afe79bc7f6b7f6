"""Keep the vectors of the outer optimizer in an unlinked file, so that they take no main memory that others need.

The file has each vector twice, for even and for odd rounds: while the state of the next round is computed, peers
download the present one and a checkpoint reads it, and a computation that is killed or fails leaves it whole. The
memory of round r is written again for round r + 2, under the same condition as that of the anchor
(`Checkpointer.free_anchor`). The vectors that a trainer applies are in the shared memory instead.

The system writes the file's pages to disk, and drops them from main memory when it needs room. A round reads them
again.
"""

import mmap
import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from node.daemon.state.outer_state import FLOAT_BYTES, OuterState
from node.trainer.ipc.shared_memory import unlinked_file
from optim.round_plan import RoundPlanner


def outer_file_bytes(planner: RoundPlanner) -> int:
    """Return the bytes on disk of both copies of the vectors."""
    return 2 * len(planner.method.outer_names) * _vector_bytes(planner)


def _vector_bytes(planner: RoundPlanner) -> int:
    return -(-FLOAT_BYTES * planner.numel // mmap.PAGESIZE) * mmap.PAGESIZE


class OuterVectors:
    """The memory of the outer optimizer's vectors, of one replica."""

    def __init__(self, folder: Path, planner: RoundPlanner) -> None:
        """Reserve the file. Raises StorageError if the disk has too little room."""
        self._names = planner.method.outer_names
        self._numel, self._vector_bytes = planner.numel, _vector_bytes(planner)
        size = outer_file_bytes(planner)
        if size:
            descriptor = unlinked_file(folder, size)
            self._map = mmap.mmap(descriptor, size)
            os.close(descriptor)

    def rooms(self, round_number: int) -> dict[str, Tensor]:
        """Return the memory of a round's vectors by name."""
        first = round_number % 2 * len(self._names)
        return {name: self._view(first + index) for index, name in enumerate(self._names)}

    def _view(self, index: int) -> Tensor:
        return torch.frombuffer(self._map, dtype=torch.float32, count=self._numel, offset=index * self._vector_bytes)

    def place(self, round_number: int, state: OuterState) -> OuterState:
        """Return the state of a round with its vectors in their memory; copy those that are elsewhere."""
        elsewhere = {
            name: room
            for name, room in self.rooms(round_number).items()
            if state.slots[name].data_ptr() != room.data_ptr()
        }
        for name, room in elsewhere.items():
            room.copy_(state.slots[name])
        return replace(state, slots={**state.slots, **elsewhere}) if elsewhere else state

"""Share memory between a daemon and its trainer: anchors, snapshots of the inner state, and the outbox.

The memory is one anonymous file (memfd, or else an unlinked temporary file), inherited by its descriptor number. It has
no name, so nothing can be left behind: the kernel frees it with the last process that holds it.

    page 0            magic, a hash of the layout, and the trainer's heartbeat count
    meta 0, meta 1    generation, length, checksum, JSON (at most 64 KiB) of each snapshot
    anchor 0, 1       flat fp32; the shared vectors of round r, weights first, are in buffer r % 2
    snapshot 0, 1     flat fp32 vectors: weights, inner optimizer, residual and reference
    outbox            the parts of the outstanding contribution, one after another

The daemon writes the anchors, the trainer everything else. (Before it starts a trainer, the daemon may restore a
snapshot and an outbox from a checkpoint on disk.) The daemon may write the anchor of round r once the trainer has
applied round r - 1 or a later one, or while no trainer runs.

A snapshot is written into the slot that does not have the newest one. Its generation is cleared first and written
last, under a checksum, so a writer killed at any instant leaves the previous snapshot whole. A reader in another
process copies, and then checks that the generation is still the newest (a sequence lock).
"""

import contextlib
import hashlib
import itertools
import json
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from optim.inner.base import WEIGHTS
from optim.method import Method
from optim.round_plan import RoundPlanner
from protocol.errors import StorageError

RESIDUAL = "residual"
REFERENCE = "reference"
MAX_META_BYTES = 64 * 1024
_PAGE = 4096
_MAGIC = b"murmur\0\3"
_HEADER = struct.Struct("<8s32s")  # magic, layout
_HEARTBEAT = struct.Struct("<Q")
_SLOT = struct.Struct("<QII")  # generation (0: none), length of the JSON, checksum of generation and JSON
_SLOT_BYTES = _PAGE + MAX_META_BYTES
_COPY_ATTEMPTS = 8


@dataclass(frozen=True)
class SharedLayout:
    """The layout of the shared memory.

    `vectors` are names and numbers of values; `anchor_numel` counts the values of all shared vectors.
    """

    anchor_numel: int
    vectors: tuple[tuple[str, int], ...]
    contribution_bytes: int

    @classmethod
    def of(cls, planner: RoundPlanner) -> Self:
        """Return the layout that a run's method needs."""
        method, numel = planner.method, planner.numel
        inner = [(name, method.inner.vector_numel(name, numel)) for name in method.inner.vectors]
        residual = (RESIDUAL, numel * method.signal.vector_count)
        reference = (REFERENCE, numel * len(locally_trained_names(method)))
        vectors = ((WEIGHTS, numel), *inner, residual, reference)
        return cls(numel * len(method.signal.shared_names), vectors, planner.max_contribution_bytes)

    @property
    def total_bytes(self) -> int:
        return self.offset(2 + 2 * len(self.vectors)) + self.contribution_bytes

    def offset(self, index: int) -> int:
        """Return the offset of a vector: both anchors, then both snapshots, then the outbox."""
        sizes = [self.anchor_numel] * 2 + [size for _, size in self.vectors] * 2
        return _PAGE + 2 * _SLOT_BYTES + sum(-(-4 * size // _PAGE) * _PAGE for size in sizes[:index])

    def layout_hash(self) -> bytes:
        """Return 32 bytes that identify this layout."""
        return hashlib.sha256(repr(self).encode()).digest()


def locally_trained_names(method: Method) -> tuple[str, ...]:
    """Return the names of the shared vectors that a trainer changes between rounds, weights first."""
    return tuple(name for name in method.signal.shared_names if name == WEIGHTS or name in method.inner.vectors)


@dataclass(frozen=True)
class Snapshot:
    """The inner state at one instant: flat fp32 CPU tensors by name, and JSON metadata."""

    generation: int
    vectors: dict[str, Tensor]
    meta: dict[str, Any]


class SharedMemory:
    """A view of the shared memory of one model; the tensors that it returns alias that memory."""

    def __init__(self, fd: int, layout: SharedLayout) -> None:
        self.fd = fd
        self.layout = layout
        self.is_pinned = False
        self._map = mmap.mmap(fd, layout.total_bytes)

    @classmethod
    def create(cls, layout: SharedLayout) -> Self:
        """Allocate zeroed memory. Raises StorageError if the machine has too little."""
        if layout.anchor_numel < 1 or layout.contribution_bytes < 1:
            raise ValueError("shared memory needs at least one parameter and one byte of outbox")
        memory = cls(anonymous_file(layout.total_bytes), layout)
        _HEADER.pack_into(memory._map, 0, _MAGIC, layout.layout_hash())
        return memory

    @classmethod
    def attach(cls, fd: int, layout: SharedLayout) -> Self:
        """Map the memory of an inherited descriptor. Raises ValueError if its layout differs."""
        if os.fstat(fd).st_size != layout.total_bytes:
            raise ValueError(f"descriptor {fd} is not shared memory for {layout.anchor_numel} shared values")
        memory = cls(fd, layout)
        if _HEADER.unpack_from(memory._map, 0) != (_MAGIC, layout.layout_hash()):
            raise ValueError(f"descriptor {fd} is shared memory with another layout")
        return memory

    @property
    def contribution_bytes(self) -> int:
        return self.layout.contribution_bytes

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last tensor that aliases it."""
        os.close(self.fd)
        self.fd = -1

    def pin(self) -> None:
        """Page-lock the memory, so that an accelerator can copy to and from it directly (0.25 s per GB).

        If the system refuses, `is_pinned` stays False.
        """
        address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self.is_pinned = int(runtime.cudaHostRegister(address, self.layout.total_bytes, 0)) == 0
        if not self.is_pinned:
            with contextlib.suppress(RuntimeError):  # CUDA raises the pending error at the next launch
                torch.zeros(1, device="cuda")

    @property
    def heartbeat_count(self) -> int:
        """Return the number of iterations of the trainer's loop, over all its restarts."""
        return int(_HEARTBEAT.unpack_from(self._map, _HEADER.size)[0])

    def record_heartbeat(self) -> None:
        """Count one iteration of the trainer's loop."""
        _HEARTBEAT.pack_into(self._map, _HEADER.size, self.heartbeat_count + 1)

    def anchor(self, round_number: int) -> Tensor:
        """Return the buffer of a round's shared vectors, one after another, weights first: flat fp32."""
        return self._view_vector(round_number % 2, self.layout.anchor_numel)

    def write_anchor(self, round_number: int, shared: Sequence[Tensor]) -> None:
        """Write the shared vectors of a round, in the method's order."""
        torch.cat(list(shared), out=self.anchor(round_number))

    @property
    def contribution_buffer(self) -> memoryview:
        """Return all bytes of the outbox, writable."""
        start = self.layout.offset(2 + 2 * len(self.layout.vectors))
        return memoryview(self._map)[start : start + self.contribution_bytes]

    def contribution_parts(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return the parts of a contribution with these sizes, without a copy."""
        outbox, ends = self.contribution_buffer, itertools.accumulate(sizes)
        return [outbox[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def write_snapshot(self, vectors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> int:
        """Copy and publish the inner state (every vector, from any device); return its generation."""
        text = json.dumps(meta, separators=(",", ":"), allow_nan=False).encode()
        if len(text) > MAX_META_BYTES:
            raise ValueError(f"the metadata of a snapshot has {len(text)} bytes; at most {MAX_META_BYTES}")
        newest = self._find_newest()
        slot, generation = (1 - newest[0], newest[1] + 1) if newest else (0, 1)
        self._invalidate_slot(slot)
        for name, shared in self._slot_vectors(slot).items():
            shared.copy_(vectors[name])
        self._publish_slot(slot, generation, text)
        return generation

    def read_snapshot(self) -> Snapshot | None:
        """Return the newest whole snapshot, whose tensors alias the memory. Use it while no trainer writes."""
        newest = self._find_newest()
        if newest is None:
            return None
        slot, generation, meta = newest
        return Snapshot(generation, self._slot_vectors(slot), meta)

    def copy_snapshot(self, contribution_bytes: int | None = None) -> tuple[Snapshot, bytes] | None:
        """Copy the newest snapshot, if any, and the outbox, while a trainer may write.

        The trainer rewrites the outbox only after a snapshot that says it is free, so one check covers both.
        """
        for _ in range(_COPY_ATTEMPTS):
            snapshot = self.read_snapshot()
            if snapshot is None:
                return None
            vectors = {name: vector.clone() for name, vector in snapshot.vectors.items()}
            outbox = bytes(self.contribution_buffer[:contribution_bytes])
            newest = self._find_newest()
            if newest is not None and newest[1] == snapshot.generation:
                return Snapshot(snapshot.generation, vectors, snapshot.meta), outbox
        raise StorageError("the trainer writes snapshots faster than they can be copied; this machine is overloaded")

    def _find_newest(self) -> tuple[int, int, dict[str, Any]] | None:
        whole = [(generation, slot, meta) for slot in (0, 1) for generation, meta in self._read_slot(slot)]
        if not whole:
            return None
        generation, slot, meta = max(whole, key=lambda found: found[0])
        return slot, generation, meta

    def _read_slot(self, slot: int) -> list[tuple[int, dict[str, Any]]]:
        start = _PAGE + slot * _SLOT_BYTES
        generation, length, checksum = _SLOT.unpack_from(self._map, start)
        if generation == 0 or length > MAX_META_BYTES:
            return []
        text = self._map[start + _SLOT.size : start + _SLOT.size + length]
        if _checksum(generation, text) != checksum:
            return []
        return [(generation, json.loads(text))]

    def _invalidate_slot(self, slot: int) -> None:
        _SLOT.pack_into(self._map, _PAGE + slot * _SLOT_BYTES, 0, 0, 0)

    def _publish_slot(self, slot: int, generation: int, text: bytes) -> None:
        start = _PAGE + slot * _SLOT_BYTES
        self._map[start + _SLOT.size : start + _SLOT.size + len(text)] = text
        _SLOT.pack_into(self._map, start, 0, len(text), _checksum(generation, text))
        struct.pack_into("<Q", self._map, start, generation)

    def _slot_vectors(self, slot: int) -> dict[str, Tensor]:
        first = 2 + slot * len(self.layout.vectors)
        return {name: self._view_vector(first + index, size) for index, (name, size) in enumerate(self.layout.vectors)}

    def _view_vector(self, index: int, numel: int) -> Tensor:
        offset = self.layout.offset(index)
        return torch.frombuffer(self._map, dtype=torch.float32, count=numel, offset=offset)


def _checksum(generation: int, text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(generation.to_bytes(8, "little")))


def anonymous_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("murmur", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp(prefix="murmur-")
        os.unlink(path)
    try:
        # Reserve all pages now: a page missing later would be a bus error in the middle of a step.
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        raise StorageError(
            f"no room for {size >> 20} MiB of shared memory ({error.strerror}); free some memory"
        ) from error
    return fd

"""Share memory between a daemon and its trainer: anchors, the trainer's vectors, and the outbox.

The memory is one anonymous file (memfd, or else an unlinked temporary file), inherited by its descriptor number. It has
no name, so nothing can be left behind: the kernel frees it with the last process that holds it.

    page 0            magic, a hash of the layout, the trainer's heartbeat count, and whether the daemon copies
    meta 0, meta 1    generation, length, checksum, JSON (at most 1 MiB): what the vectors are
    anchor 0, 1       flat fp32; the shared vectors of round r, weights first, are in buffer r % 2
    vectors           flat: weights, inner optimizer, residual and reference; fp32, or bytes for 8-bit moments
    scratch           flat fp32: the gradient; between two steps, room for a result that is about to be stored
    outbox            the parts of the outstanding contribution, one after another

With little memory (`memory = "small"`) the vectors that no inner step touches, which are anchors, residual and
reference, are in a second file, an unlinked one on disk. The system writes their pages to disk and drops them from
memory when it needs room; a round reads them again.

The daemon writes the anchors, the trainer everything else. (Before it starts a trainer, the daemon may restore vectors
and an outbox from a checkpoint on disk.) The daemon may write the anchor of round r once the trainer has applied round
r - 1 or a later one, or while no trainer runs.

There is one copy of the vectors. On a CPU they are those that the trainer trains; next to an accelerator they are a
copy of its memory. The trainer publishes in the metadata that it begins to change them, and how that can be finished;
afterwards it publishes the new metadata (`node.trainer.vectors`). So a trainer killed at any instant leaves either
whole vectors, or a change that the next one finishes. Metadata is written into the slot that does not have the newest,
its generation last and under a checksum.

A reader in another process copies, and then checks that the generation is still the newest and names no change (a
sequence lock). Meanwhile the trainer computes gradients, but does not begin a change for `hold_seconds`.
"""

import contextlib
import hashlib
import itertools
import json
import mmap
import os
import select
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from optim.inner.base import WEIGHTS
from optim.method import Method
from optim.round_plan import RoundPlanner
from protocol.errors import StorageError

_MAGIC = b"murmur\0\4"
_HEADER = struct.Struct("<8s32s")  # magic, layout
_HEARTBEAT = struct.Struct("<Q")
_SLOT = struct.Struct("<QII")  # generation (0: none), length of the JSON, checksum of generation and JSON
_HOLD = struct.Struct("<Q")  # number of readers that wait for the trainer to begin no change
_HOLD_OFFSET = _HEADER.size + _HEARTBEAT.size
HOLD_SECONDS = 30.0  # and longer for large models, but less than until a silent trainer counts as stuck
MAX_HOLD_SECONDS = 240.0
READ_BYTES_PER_SECOND = 5e7  # at least, while a checkpoint is written
COPY_SECONDS = 20.0
POLL_SECONDS = 0.002
Pending = Mapping[str, Any]  # a change that has begun, as its writer describes it
RESIDUAL = "residual"
REFERENCE = "reference"
ANCHORS = "anchors"
SCRATCH = "scratch"
RARELY_USED = (ANCHORS, RESIDUAL, REFERENCE)  # by rounds alone
MAX_META_BYTES = 1024 * 1024  # two ledgers of a stage have at most 0.8 MB
PAGE = 4096
SLOT_BYTES = PAGE + MAX_META_BYTES  # of metadata; there are two
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class SharedLayout:
    """The sizes and places of everything in the shared memory.

    `vectors` are names and numbers of values; `anchor_numel` counts the values of all shared vectors. Vectors are fp32
    except `byte_names`. Those of `file_names` are in a file on disk.
    """

    anchor_numel: int
    vectors: tuple[tuple[str, int], ...]
    contribution_bytes: int
    scratch_numel: int = 1
    byte_names: tuple[str, ...] = ()
    file_names: tuple[str, ...] = ()

    @classmethod
    def of(cls, planner: RoundPlanner) -> Self:
        """Return the layout that a run's method needs."""
        method, numel, rule = planner.method, planner.numel, planner.method.inner
        inner = [(name, rule.vector_numel(name, planner.layout)) for name in rule.vectors]
        residual = (RESIDUAL, numel * method.signal.vector_count)
        reference = (REFERENCE, numel * len(locally_trained_names(method)))
        vectors = ((WEIGHTS, numel), *inner, residual, reference)
        scratch = max(reference[1], residual[1])
        anchor_numel = numel * len(method.signal.shared_names)
        in_bytes = tuple(name for name in rule.vectors if rule.vector_dtype(name) is torch.uint8)
        in_file = RARELY_USED if method.has_small_memory else ()
        return cls(anchor_numel, vectors, planner.max_contribution_bytes, scratch, in_bytes, in_file)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of main memory."""
        return self.outbox_offset + self.contribution_bytes

    @property
    def file_bytes(self) -> int:
        """Return the bytes of the file on disk; 0 means that there is none."""
        return sum(_whole_pages(size) for name, size in self._rooms if name in self.file_names)

    @property
    def outbox_offset(self) -> int:
        return self.offset(len(self._rooms))

    @cached_property
    def _rooms(self) -> tuple[tuple[str, int], ...]:
        """Return names and bytes of both anchors, the trainer's vectors, and the scratch."""
        anchor = (ANCHORS, _FLOAT_BYTES * self.anchor_numel)
        own = tuple((name, self.vector_bytes(name, size)) for name, size in self.vectors)
        return (anchor, anchor, *own, (SCRATCH, _FLOAT_BYTES * self.scratch_numel))

    def vector_bytes(self, name: str, numel: int) -> int:
        """Return the bytes of a vector with that many values."""
        return numel * self.dtype(name).itemsize

    def dtype(self, name: str) -> torch.dtype:
        return torch.uint8 if name in self.byte_names else torch.float32

    def is_in_file(self, index: int) -> bool:
        """Return whether a vector is in the file on disk."""
        return index < len(self._rooms) and self._rooms[index][0] in self.file_names

    def offset(self, index: int) -> int:
        """Return the offset of a vector in its file: both anchors, the trainer's vectors, the scratch, the outbox."""
        in_file = self.is_in_file(index)
        before = (size for name, size in self._rooms[:index] if (name in self.file_names) == in_file)
        return (0 if in_file else PAGE + 2 * SLOT_BYTES) + sum(map(_whole_pages, before))

    def layout_hash(self) -> bytes:
        """Return 32 bytes that identify this layout."""
        return hashlib.sha256(repr(self).encode()).digest()


def locally_trained_names(method: Method) -> tuple[str, ...]:
    """Return the names of the shared vectors that a trainer changes between rounds, weights first."""
    return tuple(name for name in method.signal.shared_names if name == WEIGHTS or name in method.inner.vectors)


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def anonymous_file(size: int) -> int:
    """Return the descriptor of that many bytes of memory. Raises StorageError."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("murmur", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp(prefix="murmur-")
        os.unlink(path)
    return _reserve(fd, size, "of shared memory", "free some memory")


def unlinked_file(folder: Path, size: int) -> int:
    """Return the descriptor of a file on disk that vanishes with the last process that holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd, path = tempfile.mkstemp(prefix=".vectors-", dir=folder)
        os.unlink(path)
    except OSError as error:
        raise StorageError(f"cannot create a file in {folder}: {error.strerror}; choose another --dir") from error
    return _reserve(fd, size, f"on the disk of {folder}", "free some space, or choose another --dir")


def _reserve(fd: int, size: int, place: str, fix: str) -> int:
    """Reserve all pages of a file now: a page missing later would be a bus error in the middle of a step."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
        else:  # macOS
            _fill_with_zeros(fd, size)
    except OSError as error:
        os.close(fd)
        raise StorageError(f"no room for {size >> 20} MiB {place} ({error.strerror}); {fix}") from error
    return fd


def _fill_with_zeros(fd: int, size: int) -> None:
    """Write all pages of a file, and let the next reader begin at its start. Raises OSError."""
    zeros = bytes(min(size, 1 << 20))
    for start in range(0, size, 1 << 20):
        part = memoryview(zeros)[: size - start]
        while part:
            part = part[os.write(fd, part) :]
    os.lseek(fd, 0, os.SEEK_SET)


@dataclass(frozen=True)
class Snapshot:
    """The inner state at one instant: flat fp32 CPU tensors by name, and JSON metadata.

    `pending` describes a change of the vectors that has begun; None if they are whole.
    """

    generation: int
    vectors: dict[str, Tensor]
    meta: dict[str, Any]
    pending: Pending | None = None


class SharedMemory:
    """A view of the shared memory of one model; the tensors that it returns alias that memory.

    `fds` are the descriptors of the memory, and of the file on disk if the layout has one.
    """

    def __init__(self, fds: Sequence[int], layout: SharedLayout) -> None:
        self.fds = tuple(fds)
        self.layout = layout
        self.is_pinned = False
        self._holds = 0
        self._hold_lock = threading.Lock()
        self._map = mmap.mmap(self.fds[0], layout.total_bytes)
        self._file_map = mmap.mmap(self.fds[1], layout.file_bytes) if layout.file_bytes else self._map

    @classmethod
    def create(cls, layout: SharedLayout, folder: Path | None = None) -> Self:
        """Allocate zeroed memory, and a file in `folder` if the layout has one.

        Raises StorageError if the machine has too little.
        """
        if layout.anchor_numel < 1 or layout.contribution_bytes < 1:
            raise ValueError("shared memory needs at least one parameter and one byte of outbox")
        fds = [anonymous_file(layout.total_bytes)]
        if layout.file_bytes:
            assert folder is not None
            fds.append(unlinked_file(folder, layout.file_bytes))
        memory = cls(fds, layout)
        _HEADER.pack_into(memory._map, 0, _MAGIC, layout.layout_hash())
        return memory

    @classmethod
    def attach(cls, fds: Sequence[int], layout: SharedLayout) -> Self:
        """Map the memory of inherited descriptors. Raises ValueError if its layout differs."""
        sizes = [layout.total_bytes, *([layout.file_bytes] if layout.file_bytes else [])]
        if [os.fstat(fd).st_size for fd in fds] != sizes:
            raise ValueError(f"descriptors {fds} are not shared memory for {layout.anchor_numel} shared values")
        memory = cls(fds, layout)
        if _HEADER.unpack_from(memory._map, 0) != (_MAGIC, layout.layout_hash()):
            raise ValueError(f"descriptors {fds} are shared memory with another layout")
        return memory

    @property
    def contribution_bytes(self) -> int:
        return self.layout.contribution_bytes

    @property
    def hold_seconds(self) -> float:
        """Return how long the trainer waits for a reader."""
        size = self.layout.total_bytes + self.layout.file_bytes
        return min(MAX_HOLD_SECONDS, HOLD_SECONDS + size / READ_BYTES_PER_SECOND)

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last tensor that aliases it."""
        for fd in self.fds:
            os.close(fd)
        self.fds = ()

    def pin(self) -> None:
        """Page-lock the memory, so that an accelerator can copy to and from it directly (0.25 s per GB).

        A file on disk is not locked. If the system refuses, `is_pinned` stays False.
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
        return self._view_vector(round_number % 2, ANCHORS, self.layout.anchor_numel)

    def write_anchor(self, round_number: int, shared: Sequence[Tensor]) -> None:
        """Write the shared vectors of a round, in the method's order; those that are there already stay."""
        rooms = torch.split(self.anchor(round_number), [vector.numel() for vector in shared])
        for room, vector in zip(rooms, shared, strict=True):
            if room.data_ptr() != vector.data_ptr():
                room.copy_(vector)

    def anchor_vectors(self, round_number: int, count: int) -> Sequence[Tensor]:
        """Return the buffer of a round's shared vectors, of which there are `count`."""
        return self.anchor(round_number).view(count, -1).unbind()

    def anchor_weights(self, round_number: int) -> Tensor:
        """Return the weights among the shared vectors of a round."""
        return self.anchor(round_number)[: dict(self.layout.vectors)[WEIGHTS]]

    @property
    def vectors(self) -> dict[str, Tensor]:
        """Return the trainer's vectors by name."""
        return {
            name: self._view_vector(2 + index, name, size) for index, (name, size) in enumerate(self.layout.vectors)
        }

    @property
    def scratch(self) -> Tensor:
        return self._view_vector(2 + len(self.layout.vectors), SCRATCH, self.layout.scratch_numel)

    @property
    def contribution_buffer(self) -> memoryview:
        """Return all bytes of the outbox, writable."""
        start = self.layout.outbox_offset
        return memoryview(self._map)[start : start + self.contribution_bytes]

    def contribution_parts(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return the parts of a contribution with these sizes, without a copy."""
        outbox, ends = self.contribution_buffer, itertools.accumulate(sizes)
        return [outbox[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def publish(self, meta: Mapping[str, Any], pending: Pending | None = None) -> int:
        """Publish what the vectors are, or that a change of them begins; return the generation.

        A change waits while a reader copies, at most `hold_seconds`.
        """
        if pending is not None:
            self._wait_while_held()
        text = json.dumps({"meta": meta, "pending": pending}, separators=(",", ":"), allow_nan=False).encode()
        if len(text) > MAX_META_BYTES:
            raise ValueError(f"the metadata of a snapshot has {len(text)} bytes; at most {MAX_META_BYTES}")
        newest = self._find_newest()
        slot, generation = (1 - newest[0], newest[1] + 1) if newest else (0, 1)
        self._invalidate_slot(slot)
        self._publish_slot(slot, generation, text)
        return generation

    def write_snapshot(self, vectors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> int:
        """Replace all vectors and publish them; return the generation. Use it while no trainer runs."""
        self.invalidate()
        for name, shared in self.vectors.items():
            shared.copy_(vectors[name])
        return self.publish(meta)

    def invalidate(self) -> None:
        """Declare that there is no snapshot, because its vectors are about to be replaced."""
        for slot in (0, 1):
            self._invalidate_slot(slot)

    def read_snapshot(self) -> Snapshot | None:
        """Return the newest snapshot, whose tensors alias the memory. A trainer that runs may change them."""
        newest = self._find_newest()
        if newest is None:
            return None
        _, generation, text = newest
        values = json.loads(text)
        return Snapshot(generation, self.vectors, values["meta"], values["pending"])

    def copy_snapshot(self, contribution_bytes: int | None = None) -> tuple[Snapshot, bytes] | None:
        """Copy the newest snapshot, if any, and the outbox, while a trainer may write."""
        for snapshot in self.whole_snapshots():
            vectors = {name: vector.clone() for name, vector in snapshot.vectors.items()}
            outbox = bytes(self.contribution_buffer[:contribution_bytes])
            if self.is_newest(snapshot):
                return Snapshot(snapshot.generation, vectors, snapshot.meta), outbox
        return None

    def whole_snapshots(self) -> Generator[Snapshot]:
        """Yield whole snapshots until one has been read before it changed; none if there is no snapshot.

        Check with `is_newest` whether that is so. Raises StorageError if it does not succeed in COPY_SECONDS.
        """
        deadline = time.monotonic() + COPY_SECONDS
        with self._held():
            while time.monotonic() < deadline:
                snapshot = self.read_snapshot()
                if snapshot is None:
                    return
                if snapshot.pending is None:
                    yield snapshot
                    if self.is_newest(snapshot):
                        return
                _pause()
        raise StorageError("the trainer changes its vectors faster than they can be copied; this machine is overloaded")

    def is_newest(self, snapshot: Snapshot) -> bool:
        """Return whether nothing has changed since this snapshot was read."""
        newest = self._find_newest()
        return newest is not None and newest[1] == snapshot.generation

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        self._count_hold(1)
        try:
            yield
        finally:
            self._count_hold(-1)

    def _count_hold(self, change: int) -> None:
        with self._hold_lock:
            self._holds += change
            _HOLD.pack_into(self._map, _HOLD_OFFSET, self._holds)

    @property
    def is_held(self) -> bool:
        """Return whether a reader copies the vectors, so that a change would wait for it."""
        return bool(_HOLD.unpack_from(self._map, _HOLD_OFFSET)[0])

    def _wait_while_held(self) -> None:
        deadline = time.monotonic() + self.hold_seconds
        while self.is_held and time.monotonic() < deadline:
            _pause()

    def _find_newest(self) -> tuple[int, int, bytes] | None:
        whole = [(generation, slot, text) for slot in (0, 1) for generation, text in self._read_slot(slot)]
        if not whole:
            return None
        generation, slot, text = max(whole)
        return slot, generation, text

    def _read_slot(self, slot: int) -> list[tuple[int, bytes]]:
        start = PAGE + slot * SLOT_BYTES
        generation, length, checksum = _SLOT.unpack_from(self._map, start)
        if generation == 0 or length > MAX_META_BYTES:
            return []
        text = self._map[start + _SLOT.size : start + _SLOT.size + length]
        return [(generation, text)] if _checksum(generation, text) == checksum else []

    def _invalidate_slot(self, slot: int) -> None:
        _SLOT.pack_into(self._map, PAGE + slot * SLOT_BYTES, 0, 0, 0)

    def _publish_slot(self, slot: int, generation: int, text: bytes) -> None:
        start = PAGE + slot * SLOT_BYTES
        self._map[start + _SLOT.size : start + _SLOT.size + len(text)] = text
        _SLOT.pack_into(self._map, start, 0, len(text), _checksum(generation, text))
        struct.pack_into("<Q", self._map, start, generation)

    def _view_vector(self, index: int, name: str, numel: int) -> Tensor:
        memory = self._file_map if self.layout.is_in_file(index) else self._map
        return torch.frombuffer(memory, dtype=self.layout.dtype(name), count=numel, offset=self.layout.offset(index))


def _checksum(generation: int, text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(generation.to_bytes(8, "little")))


def _pause() -> None:
    """Wait until the next look at the memory; `time.sleep` fails in a process whose clock a library shifts."""
    select.select([], [], [], POLL_SECONDS)

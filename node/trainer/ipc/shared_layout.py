"""The layout of the memory that a daemon and its trainer share (`node.trainer.ipc.shared_memory`), and its files."""

import hashlib
import os
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import torch

from optim.inner.base import WEIGHTS
from optim.method import Method
from optim.round_plan import RoundPlanner
from protocol.errors import StorageError

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
    """The layout of the shared memory.

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
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        raise StorageError(f"no room for {size >> 20} MiB {place} ({error.strerror}); {fix}") from error
    return fd

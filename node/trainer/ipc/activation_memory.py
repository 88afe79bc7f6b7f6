"""Share activations between a daemon and its trainer: slots of two sizes in one anonymous file.

The first slots hold one activation each, or its gradient; the others hold the tokens of a microbatch. The daemon
decides who writes a slot when: it puts an input there that it has fetched, or lets the trainer put an output there, and
serves that to other peers from the same memory.
"""

import mmap
import os
from typing import Self

from pydantic import BaseModel, ConfigDict, PositiveInt

from node.trainer.ipc.shared_memory import anonymous_file

ALIGNMENT = 64  # of slots, so that a trainer can view any of them as numbers


class SlotSizes(BaseModel):
    """The bytes of an activation and of the tokens of a microbatch, and the number of slots for each."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    activation_bytes: PositiveInt
    activations: PositiveInt
    token_bytes: PositiveInt
    tokens: PositiveInt

    @property
    def total_bytes(self) -> int:
        return self.activations * _aligned(self.activation_bytes) + self.tokens * _aligned(self.token_bytes)

    def place(self, slot: int) -> tuple[int, int]:
        """Return the offset and the bytes of a slot. Raises ValueError if there is none of that number."""
        if 0 <= slot < self.activations:
            return slot * _aligned(self.activation_bytes), self.activation_bytes
        if self.activations <= slot < self.activations + self.tokens:
            after = slot - self.activations
            first = self.activations * _aligned(self.activation_bytes)
            return first + after * _aligned(self.token_bytes), self.token_bytes
        raise ValueError(f"there is no slot {slot}")


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class ActivationMemory:
    """The slots of one stage, by number."""

    def __init__(self, fd: int, sizes: SlotSizes) -> None:
        self.fd = fd
        self.sizes = sizes
        self._map = mmap.mmap(fd, sizes.total_bytes)

    @classmethod
    def create(cls, sizes: SlotSizes) -> Self:
        """Allocate zeroed memory. Raises StorageError if the machine has too little."""
        return cls(anonymous_file(sizes.total_bytes), sizes)

    @classmethod
    def attach(cls, fd: int, sizes: SlotSizes) -> Self:
        """Map the memory of an inherited descriptor. Raises ValueError if its size differs."""
        if os.fstat(fd).st_size != sizes.total_bytes:
            raise ValueError(f"descriptor {fd} does not have {sizes.total_bytes} bytes")
        return cls(fd, sizes)

    def slot(self, number: int) -> memoryview:
        """Return the bytes of a slot, writable. Raises ValueError if there is none of that number."""
        start, size = self.sizes.place(number)
        return memoryview(self._map)[start : start + size]

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last view of it."""
        os.close(self.fd)
        self.fd = -1

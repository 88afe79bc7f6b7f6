"""Ledgers: the microbatches that a gradient, a snapshot or a contribution contains.

A ledger is a set of (owner, serial). Serials are stored as bits in blocks of 256, so a ledger with a random half of an
owner's microbatches takes two bits for each. Snapshots and contributions contain one.

A `StepLedger` does the same for an exact step, whose microbatches have the ids 0 .. count - 1. `covers_step` is the
void rule: a commit changes the weights only if the ledgers of its contributions name every id exactly once.
"""

import base64
import binascii
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Self

from google.protobuf.message import DecodeError

from protocol import murmur_pb2 as wire
from protocol.errors import LimitError, MalformedError
from protocol.identity import PeerId, public_key
from protocol.pipeline.messages import MAX_SERIAL, Key

BLOCK_SERIALS = 256
BLOCK_BYTES = BLOCK_SERIALS // 8
MAX_OWNERS = 1024
MAX_BLOCKS = 8192  # a quarter of a mebibyte
MAX_LEDGER_BYTES = 512 * 1024


Combine = Callable[[int, int], int]


class Ledger:
    """A set of microbatches."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._owners: dict[PeerId, dict[int, int]] = {}
        for key in keys:
            self.add(key)

    def __contains__(self, key: Key) -> bool:
        block, bit = divmod(key.serial, BLOCK_SERIALS)
        return bool(self._owners.get(key.owner, {}).get(block, 0) >> bit & 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self._owners == other._owners

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __len__(self) -> int:
        return sum(bits.bit_count() for blocks in self._owners.values() for bits in blocks.values())

    def __bool__(self) -> bool:
        return bool(self._owners)

    def __iter__(self) -> Iterator[Key]:
        """Iterate over the microbatches in ascending order."""
        for owner in sorted(self._owners):
            for block in sorted(self._owners[owner]):
                bits = self._owners[owner][block]
                yield from (Key(owner, block * BLOCK_SERIALS + bit) for bit in range(BLOCK_SERIALS) if bits >> bit & 1)

    @property
    def block_count(self) -> int:
        """The number of blocks, which bounds memory and bytes."""
        return sum(len(blocks) for blocks in self._owners.values())

    @property
    def owners(self) -> frozenset[PeerId]:
        return frozenset(self._owners)

    def has_room_for(self, key: Key) -> bool:
        """Return whether the ledger stays within its bounds with this microbatch."""
        blocks = self._owners.get(key.owner)
        if blocks is None:
            return len(self._owners) < MAX_OWNERS and self.block_count < MAX_BLOCKS
        return key.serial // BLOCK_SERIALS in blocks or self.block_count < MAX_BLOCKS

    def add(self, key: Key) -> None:
        """Add a microbatch.

        Raises LimitError if the ledger would become too large.
        """
        if not self.has_room_for(key):
            raise LimitError("a ledger with too many owners or scattered serials")
        block, bit = divmod(key.serial, BLOCK_SERIALS)
        blocks = self._owners.setdefault(key.owner, {})
        blocks[block] = blocks.get(block, 0) | 1 << bit

    def copy(self) -> "Ledger":
        return self | Ledger()

    def __or__(self, other: "Ledger") -> "Ledger":
        """Return the union."""
        union = Ledger()
        for ledger in (self, other):
            for owner, blocks in ledger._owners.items():
                mine = union._owners.setdefault(owner, {})
                for block, bits in blocks.items():
                    mine[block] = mine.get(block, 0) | bits
        return union

    def __and__(self, other: "Ledger") -> "Ledger":
        """Return the intersection."""
        return self._combine(other, lambda mine, theirs: mine & theirs)

    def __sub__(self, other: "Ledger") -> "Ledger":
        """Return the difference."""
        return self._combine(other, lambda mine, theirs: mine & ~theirs)

    def _combine(self, other: "Ledger", combine: "Combine") -> "Ledger":
        result = Ledger()
        for owner, blocks in self._owners.items():
            theirs = other._owners.get(owner, {})
            kept = {block: left for block, bits in blocks.items() if (left := combine(bits, theirs.get(block, 0)))}
            if kept:
                result._owners[owner] = kept
        return result

    def is_disjoint(self, other: "Ledger") -> bool:
        """Return whether the two have no microbatch in common."""
        return not self & other

    def missing(self, wanted: "Ledger") -> "Ledger":
        """Return the wanted microbatches that this ledger does not contain."""
        return wanted - self

    def to_bytes(self) -> bytes:
        return wire.SerialLedger(
            owners=[
                wire.OwnedSerials(
                    owner=owner,
                    blocks=sorted(blocks),
                    bits=b"".join(blocks[block].to_bytes(BLOCK_BYTES, "little") for block in sorted(blocks)),
                )
                for owner, blocks in sorted(self._owners.items())
            ]
        ).SerializeToString(deterministic=True)

    def to_text(self) -> str:
        """Encode the ledger as base64 for JSON; an empty ledger is an empty string."""
        return base64.b64encode(self.to_bytes()).decode()

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse the output of `to_text`. Raises MalformedError or LimitError."""
        try:
            return cls.from_bytes(base64.b64decode(text, validate=True))
        except binascii.Error as error:
            raise MalformedError("a ledger that is not base64") from error

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Parse a ledger. Only the canonical encoding is accepted, so equal ledgers have equal bytes.

        Raises MalformedError or LimitError.
        """
        if len(content) > MAX_LEDGER_BYTES:
            raise LimitError(f"a ledger of {len(content)} bytes, at most {MAX_LEDGER_BYTES} are allowed")
        try:
            body = wire.SerialLedger.FromString(content)
        except DecodeError as error:
            raise MalformedError("a ledger that does not parse") from error
        ledger = cls()
        for entry in body.owners:
            public_key(entry.owner)
            ledger._owners[entry.owner] = _read_blocks(entry)
        if len(ledger._owners) > MAX_OWNERS or ledger.block_count > MAX_BLOCKS:
            raise LimitError("a ledger with too many owners or scattered serials")
        if ledger.to_bytes() != content:
            raise MalformedError("a ledger that is not in canonical form")
        return ledger


def _read_blocks(entry: wire.OwnedSerials) -> dict[int, int]:
    if not entry.blocks or len(entry.bits) != BLOCK_BYTES * len(entry.blocks):
        raise MalformedError("a ledger whose bits do not match its blocks")
    if max(entry.blocks) > MAX_SERIAL // BLOCK_SERIALS:
        raise MalformedError("a ledger with a serial out of range")
    starts = range(0, len(entry.bits), BLOCK_BYTES)
    numbers = [int.from_bytes(entry.bits[start : start + BLOCK_BYTES], "little") for start in starts]
    if not all(numbers):
        raise MalformedError("a ledger with an empty block")
    return dict(zip(entry.blocks, numbers, strict=True))


@dataclass(frozen=True)
class StepLedger:
    """A set of ids below `count`."""

    count: int
    bits: int = 0

    @classmethod
    def of(cls, count: int, ids: Iterable[int]) -> Self:
        """Return the set of these ids, all below `count`."""
        return cls(count, reduce(lambda bits, number: bits | 1 << number, ids, 0))

    @classmethod
    def full(cls, count: int) -> Self:
        """Return all ids of a step."""
        return cls(count, (1 << count) - 1)

    @classmethod
    def from_bytes(cls, content: bytes, count: int) -> Self:
        """Parse the canonical encoding of a ledger of `count` microbatches. Raises MalformedError."""
        bits = int.from_bytes(content, "little")
        if len(content) != -(-count // 8) or bits >> count:
            raise MalformedError(f"a ledger that is not one of {count} microbatches")
        return cls(count, bits)

    def to_bytes(self) -> bytes:
        return self.bits.to_bytes(-(-self.count // 8), "little")

    def __contains__(self, number: int) -> bool:
        return bool(self.bits >> number & 1)

    def __iter__(self) -> Iterator[int]:
        return (number for number in range(self.count) if self.bits >> number & 1)

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __or__(self, other: Self) -> "StepLedger":
        return StepLedger(self.count, self.bits | other.bits)

    def __and__(self, other: Self) -> "StepLedger":
        return StepLedger(self.count, self.bits & other.bits)

    def __sub__(self, other: Self) -> "StepLedger":
        return StepLedger(self.count, self.bits & ~other.bits)

    @property
    def is_complete(self) -> bool:
        """Whether the ledger has all ids of the step."""
        return self.bits == (1 << self.count) - 1


def covers_step(ledgers: Iterable[bytes], count: int) -> bool:
    """Return whether these ledgers are disjoint and together name every id."""
    seen = StepLedger(count)
    for content in ledgers:
        ledger = StepLedger.from_bytes(content, count)
        if (seen & ledger).bits:
            return False
        seen |= ledger
    return seen.is_complete

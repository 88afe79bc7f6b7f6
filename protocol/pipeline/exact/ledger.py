"""The microbatches of one exact step that a sum of gradients contains: a bitmap of its ids 0 .. count - 1.

`covers_step` is the void rule: a commit whose contributions' ledgers do not name every id exactly once changes nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Self

from protocol.errors import MalformedError


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
        """Parse the ledger of a step of `count` microbatches; each has one encoding only. Raises MalformedError."""
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
        """Return whether it has all ids of the step."""
        return self.bits == (1 << self.count) - 1


def covers_step(ledgers: Iterable[bytes], count: int) -> bool:
    """Return whether these ledgers are disjoint and together complete."""
    seen = StepLedger(count)
    for content in ledgers:
        ledger = StepLedger.from_bytes(content, count)
        if (seen & ledger).bits:
            return False
        seen |= ledger
    return seen.is_complete

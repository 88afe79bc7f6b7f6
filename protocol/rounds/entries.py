"""What of a commit really went into a peer's state, for whoever tells it: the log, the counters, the simulation.

Not what was offered, nor all that the commit names: in groups that is what other groups applied, and where a partner
died with its message, even our own group applied less.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from protocol.identity import PeerId
from protocol.rounds.statements import Contribution, SignedMessage
from protocol.rounds.view import blobs_of


@dataclass(frozen=True)
class AppliedContributions:
    """`parts`: of the contributions of `peers`; `size`: of these together, in bytes."""

    peers: tuple[PeerId, ...]
    part_count: int
    total_bytes: int

    @classmethod
    def of(cls, contributions: Sequence[SignedMessage[Contribution]]) -> Self:
        """`share`: the contributions that were applied."""
        blobs = blobs_of(contributions)
        return cls(tuple(entry.sender for entry in contributions), len(blobs), sum(blob.size for blob in blobs))

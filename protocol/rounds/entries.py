"""What of a commit really went into a peer's state, for whoever tells it: the log, the counters, the simulation.

Not what was offered, nor all that the commit names: in groups that is what other groups applied, and where a partner
died with its message, even our own group applied less.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from protocol.identity import PeerId
from protocol.rounds.statements import Contribution, Statement
from protocol.rounds.view import blobs_of


@dataclass(frozen=True)
class Entries:
    """`parts`: of the contributions of `peers`; `size`: of these together, in bytes."""

    peers: tuple[PeerId, ...]
    parts: int
    size: int

    @classmethod
    def of(cls, share: Sequence[Statement[Contribution]]) -> Self:
        """`share`: the contributions that were applied."""
        blobs = blobs_of(share)
        return cls(tuple(entry.sender for entry in share), len(blobs), sum(blob.size for blob in blobs))

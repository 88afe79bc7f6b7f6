"""A trust point: a round of a run that somebody vouches for, in a text short enough to read out.

    1234-9f3c21aa5b0e77d41c09a3e2f6d4b810

The number is that of the rounds before it. The rest is the beginning of a SHA-256 over the digests of the chain, of the
state and of the electorate there, so a chain that passes through the point has the same history, model and voters. The
organiser's host signs the newest one with the manifest; `murmur status` shows that of a node.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Self

from protocol.errors import MalformedError
from protocol.manifest.sections import MAX_ROUNDS

Digest = bytes  # 32 bytes, SHA-256
MARK_BYTES = 16
TRUST_PATTERN = rf"(\d{{1,8}})-([0-9a-f]{{{2 * MARK_BYTES}}})"


@dataclass(frozen=True)
class TrustPoint:
    """A round, and the mark that its chain, state and voters must have."""

    round: int
    mark: bytes

    @classmethod
    def of(cls, round_number: int, chain: Digest, state: Digest, voters: Digest) -> Self:
        """Return the trust point at a head.

        Args:
            round_number: the rounds before it.
            chain: the digest of the head.
            state: the digest of the outer state; empty where peers share none.
            voters: the digest of the electorate.
        """
        parts = b"".join(hashlib.sha256(part).digest() for part in (chain, state, voters))
        return cls(round_number, hashlib.sha256(b"murmur trust %d " % round_number + parts).digest()[:MARK_BYTES])

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text of a trust point. Raises MalformedError."""
        found = re.fullmatch(TRUST_PATTERN, text.strip())
        if found is None or int(found[1]) > MAX_ROUNDS:
            raise MalformedError("a trust point looks like 1234-9f3c21aa5b0e77d41c09a3e2f6d4b810")
        return cls(int(found[1]), bytes.fromhex(found[2]))

    def __str__(self) -> str:
        return f"{self.round}-{self.mark.hex()}"

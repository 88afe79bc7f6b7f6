"""Draw the contributions of a round that are audited, and their auditors. PURE.

The digest of the chain after a commit decides, so nobody knows the draw while it can still change its contribution,
and every peer on the chain computes the same. Each contribution is drawn with the probability `share`, and its
auditors are ranked: the first one repeats the work; the next two only if the first one finds a difference.
"""

import hashlib
from collections.abc import Collection
from typing import NamedTuple

from protocol.consensus.messages.contributions import Commit, Contribution
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.identity import PeerId

PANEL = 3  # auditors of one contribution, the majority of whom decides


AuditKey = tuple[Digest, PeerId]  # chain and audited peer


class Audit(NamedTuple):
    """A contribution that is audited, the chain's digest after its commit, and its auditors in their order."""

    contribution: SignedMessage[Contribution]
    chain: Digest
    auditors: tuple[PeerId, ...]

    @property
    def key(self) -> AuditKey:
        return self.chain, self.contribution.sender


def draw_audits(commit: Commit, chain: Digest, share: float, voters: Collection[PeerId]) -> tuple[Audit, ...]:
    """Return the audits of a round.

    Args:
        commit: the decided commit.
        chain: the digest of the chain after it.
        share: the probability with which a contribution is audited.
        voters: the keys with a vote; empty if nobody has one yet. Contributors that are among them audit.
    """
    contributors = [entry.sender for entry in commit.contributions]
    candidates = [peer for peer in contributors if peer in voters] or contributors
    return tuple(
        Audit(entry, chain, _rank_auditors(entry.sender, chain, candidates))
        for entry in commit.contributions
        if share > 0 and is_drawn(entry.sender, chain, share)
    )


def is_drawn(peer: PeerId, chain: Digest, share: float) -> bool:
    """Return whether the contribution of a peer is audited."""
    return _draw(b"audit", chain, peer) < share * 2**64


def _rank_auditors(audited: PeerId, chain: Digest, candidates: Collection[PeerId]) -> tuple[PeerId, ...]:
    others = [peer for peer in candidates if peer != audited]
    return tuple(sorted(others, key=lambda peer: (_draw(b"auditor", chain, audited, peer), peer))[:PANEL])


def _draw(label: bytes, chain: Digest, *peers: PeerId) -> int:
    text = b"\0".join([b"murmur " + label, chain.hex().encode(), *(peer.encode() for peer in peers)])
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")

"""The outcome of every contribution and the costs of the swarm, from which the results are computed."""

import hashlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Literal

from node.trainer.ipc.channel import ContributionHeader
from optim.aggregation.base import LeftOut
from protocol.blobs.blob import Blob
from protocol.consensus.messages.contributions import Commit
from protocol.consensus.messages.signed import Digest
from protocol.identity import PeerId

ContributionEnd = Literal["under way", "included", "given back", "lost", "died"]
ContributionKey = tuple[PeerId, int]  # its peer and the round that it was made for


@dataclass
class ContributionRecord:
    """One contribution: its parts, and how it ended."""

    parts: tuple[Blob, ...]
    tokens: int
    times_included: int = 0
    end: ContributionEnd = "under way"


@dataclass
class Accounting:
    """The accounts of one simulated run.

    `busy_seconds` is virtual time spent computing, by slot; `logic_seconds` is CPU time spent in the round machines.
    """

    contributions: dict[ContributionKey, ContributionRecord] = field(default_factory=dict)
    commits: dict[Digest, Commit] = field(default_factory=dict)  # by base digest
    newest: dict[PeerId, ContributionRecord] = field(default_factory=dict)
    rejections: Counter[str] = field(default_factory=Counter)
    left_out: Counter[tuple[PeerId, LeftOut]] = field(default_factory=Counter)  # by the method's rule
    busy_seconds: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    steps: int = 0
    state_syncs: int = 0
    replays: int = 0
    logic_seconds: float = 0.0

    def record_contribution(self, peer: PeerId, header: ContributionHeader, parts: tuple[Blob, ...]) -> None:
        """Record a new contribution. Raises AssertionError if the peer already made one for this round."""
        assert (peer, header.round) not in self.contributions, "two contributions of one peer for one round"
        self.contributions[peer, header.round] = self.newest[peer] = ContributionRecord(parts, header.tokens)

    def record_commit(self, commit: Commit) -> None:
        """Record a commit once, however many peers learn of it.

        Raises AssertionError if a round has two different commits.
        """
        if commit.base in self.commits:
            assert self.commits[commit.base].content_digest == commit.content_digest, "two commits of one round"
            return
        self.commits[commit.base] = commit
        for contribution in commit.contributions:
            entry = self.newest[contribution.sender]
            assert entry.parts == contribution.body.parts, "a commit of a contribution that is not under way"
            entry.times_included += 1

    def withdraw(self, base: Digest) -> None:
        """Forget the commit of this base, and those that continue it, because all peers that knew them are dead."""
        while (commit := self.commits.pop(base, None)) is not None:
            parts = {(entry.sender, entry.body.parts) for entry in commit.contributions}
            for (peer, _), entry in self.contributions.items():
                if (peer, entry.parts) in parts:
                    entry.times_included -= 1
                    entry.end = "died" if entry.end == "included" else entry.end
            base = hashlib.sha256(base + commit.content_digest).digest()

    def record_end(self, peer: PeerId, made_for_round: int, end: ContributionEnd) -> None:
        """Record how a contribution ended."""
        self.contributions[peer, made_for_round].end = end

    def record_death(self, peer: PeerId) -> None:
        """Mark the dead peer's contributions under way as died."""
        for (owner, _), entry in self.contributions.items():
            if owner == peer and entry.end == "under way":
                entry.end = "died"

    @property
    def contribution_bits(self) -> int:
        return 8 * sum(blob.size for entry in self.contributions.values() for blob in entry.parts)

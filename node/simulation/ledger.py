"""What became of every message, and what the swarm spent: the accounts from which results are drawn."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Literal

from node.channel import Message
from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.rounds.statements import Commit, Digest

End = Literal["under way", "included", "given back", "lost", "died"]
Key = tuple[PeerId, int]  # who made it, in which round


@dataclass
class Entry:
    parts: tuple[Blob, ...]
    tokens: int
    times_included: int = 0
    end: End = "under way"


@dataclass
class Ledger:
    """`busy_seconds`: of computing, by slot. `logic_seconds`: the processor's, inside the round machines."""

    entries: dict[Key, Entry] = field(default_factory=dict)
    commits: dict[Digest, Commit] = field(default_factory=dict)  # by the base they continue
    newest: dict[PeerId, Entry] = field(default_factory=dict)
    skips: Counter[str] = field(default_factory=Counter)
    busy_seconds: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    steps: int = 0
    takeovers: int = 0
    logic_seconds: float = 0.0

    def enter(self, peer: PeerId, message: Message, parts: tuple[Blob, ...]) -> None:
        """A new message. AssertionError if this peer made one for that round before."""
        assert (peer, message.round) not in self.entries, "two messages of one peer for one round"
        self.entries[peer, message.round] = self.newest[peer] = Entry(parts, message.tokens)

    def decide(self, commit: Commit) -> None:
        """Counted once, however many peers learn of it. AssertionError where a round was decided in two ways."""
        if commit.base in self.commits:
            assert self.commits[commit.base].content == commit.content, "two commits of one round"
            return
        self.commits[commit.base] = commit
        for contribution in commit.contributions:
            entry = self.newest[contribution.sender]
            assert entry.parts == contribution.body.parts, "a commit of a message that is not on its way"
            entry.times_included += 1

    def settle(self, peer: PeerId, message_round: int, end: End) -> None:
        self.entries[peer, message_round].end = end

    def bury(self, peer: PeerId) -> None:
        for (owner, _), entry in self.entries.items():
            if owner == peer and entry.end == "under way":
                entry.end = "died"

    @property
    def message_bits(self) -> int:
        return 8 * sum(blob.size for entry in self.entries.values() for blob in entry.parts)

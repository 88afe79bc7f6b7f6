"""The chain of commits: which rounds were decided, in which order, and which of two chains is to be preferred.

    digest(0)     = SHA-256("murmur genesis" + run id)
    digest(r + 1) = SHA-256(digest(r) + SHA-256(commit of round r, in canonical form and without its view))

The view is left out because it says who proposed a commit, not what was decided. Of two chains the one with more
tokens wins; with equally many, the one whose digest is lower.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from protocol.consensus.messages import Commit, Digest, SignedMessage
from protocol.errors import CheckpointError, StaleError
from protocol.identity import PeerId
from protocol.manifest import RunId

MAX_KEPT_COMMITS = 64


@dataclass(frozen=True)
class ChainHead:
    """Where a chain stands: rounds decided, the digest after them, and the tokens in them."""

    round: int
    digest: Digest
    tokens: int

    def to_json(self) -> dict[str, int | str]:
        return {"round": self.round, "digest": self.digest.hex(), "tokens": self.tokens}

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> Self:
        """Raises CheckpointError for anything that `to_json` does not give."""
        number, digest, tokens = (values.get(key) for key in ("round", "digest", "tokens"))
        if not (_is_count(number) and _is_count(tokens) and isinstance(digest, str) and len(digest) == 64):
            raise CheckpointError("the chain head in the checkpoint is malformed; use an earlier checkpoint")
        try:
            return cls(int(str(number)), bytes.fromhex(digest), int(str(tokens)))
        except ValueError as error:
            raise CheckpointError("the chain head in the checkpoint is malformed; use an earlier checkpoint") from error


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def genesis_head(run_id: RunId) -> ChainHead:
    return ChainHead(0, hashlib.sha256(b"murmur genesis" + bytes.fromhex(run_id)).digest(), 0)


def extend_head(head: ChainHead, commit: Commit) -> ChainHead:
    """The head once `commit` is applied. StaleError: the commit does not belong on this head."""
    if (commit.round, commit.base) != (head.round, head.digest):
        raise StaleError(f"a commit of round {commit.round} does not continue this chain at round {head.round}")
    digest = hashlib.sha256(head.digest + commit.content_digest).digest()
    return ChainHead(head.round + 1, digest, head.tokens + commit.tokens)


def prefers_theirs(mine: ChainHead, theirs: ChainHead) -> bool:
    """Whether their chain is to replace ours."""
    return (theirs.tokens, mine.digest) > (mine.tokens, theirs.digest)


def is_state_outvoted(
    chain_digest: Digest, state_digest: Digest, votes: Mapping[PeerId, tuple[Digest, Digest]]
) -> bool:
    """Whether our state is the odd one out among those who stand at the same point of the chain.

    `votes`: of every live peer but us, (chain digest, state digest). Whoever has fewer votes than some other state
    is wrong; of equally many, the lowest state digest is right.
    """
    counts: dict[Digest, int] = {state_digest: 1}
    for their_chain, their_state in votes.values():
        if their_chain == chain_digest:
            counts[their_state] = counts.get(their_state, 0) + 1
    return min(counts, key=lambda candidate: (-counts[candidate], candidate)) != state_digest


class Chain:
    """The head of our chain and the last commits that led to it, oldest first."""

    def __init__(self, head: ChainHead, commits: Sequence[SignedMessage[Commit]] = ()) -> None:
        self.head = head
        self._commits = list(commits)[-MAX_KEPT_COMMITS:]

    @classmethod
    def from_genesis(cls, run_id: RunId) -> Self:
        return cls(genesis_head(run_id))

    @property
    def round(self) -> int:
        return self.head.round

    @property
    def digest(self) -> Digest:
        return self.head.digest

    @property
    def tokens(self) -> int:
        return self.head.tokens

    def append(self, commit: SignedMessage[Commit]) -> ChainHead:
        """The new head. StaleError: the commit does not continue this chain."""
        self.head = extend_head(self.head, commit.body)
        self._commits.append(commit)
        del self._commits[:-MAX_KEPT_COMMITS]
        return self.head

    def switch_to(self, head: ChainHead, commits: Sequence[SignedMessage[Commit]] = ()) -> None:
        """Go over to another chain, of which only the last commits are known."""
        self.head = head
        self._commits = list(commits)[-MAX_KEPT_COMMITS:]

    def commits_since(self, number: int) -> tuple[SignedMessage[Commit], ...] | None:
        """The commits that lead from `number` decided rounds to our head; None where the log does not reach back."""
        missing = self.head.round - number
        if not 0 <= missing <= len(self._commits):
            return None
        return tuple(self._commits[len(self._commits) - missing :])

    def head_after(self, commits: Sequence[SignedMessage[Commit]]) -> ChainHead:
        """The head after these further commits; nothing changes. StaleError where one does not fit."""
        head = self.head
        for commit in commits:
            head = extend_head(head, commit.body)
        return head

"""The chain of commits, and the rule by which all peers prefer one of two chains.

    digest(0)     = SHA-256("murmur genesis" + run id)
    digest(r + 1) = SHA-256(digest(r) + SHA-256(commit of round r, in canonical form and without its view))

The view is left out because it depends on the leader that proposed a commit, not on its content. The chain with more
tokens wins; if both have the same number, the one with the lower digest.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from protocol.admission.electorate import OPEN, Electorate
from protocol.consensus.messages import Commit, Digest, SignedMessage
from protocol.errors import CheckpointError, MalformedError, StaleError
from protocol.identity import PeerId
from protocol.manifest import AdmissionSection, RunId
from protocol.steering.revisions import NO_REVISION

MAX_KEPT_COMMITS = 64


@dataclass(frozen=True)
class ChainHead:
    """The position of a chain: its number of decided rounds, the digest after them, and their tokens.

    `revision`: the newest revision that the chain has adopted. It follows from the digest, so it does not count in
    comparisons, and peer records do not name it.
    """

    round: int
    digest: Digest
    tokens: int
    revision: Digest = field(default=NO_REVISION, compare=False)

    def to_json(self) -> dict[str, int | str]:
        """Return the head as it is stored in a checkpoint."""
        digest, revision = self.digest.hex(), self.revision.hex()
        return {"round": self.round, "digest": digest, "tokens": self.tokens, "revision": revision}

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> Self:
        """Read a head from a checkpoint.

        Raises:
            CheckpointError: `to_json` has not written these values.
        """
        number, digest, tokens = (values.get(key) for key in ("round", "digest", "tokens"))
        revision = values.get("revision", "")
        is_named = isinstance(digest, str) and len(digest) == 64 and isinstance(revision, str)
        if not (_is_count(number) and _is_count(tokens) and is_named and len(str(revision)) in (0, 64)):
            raise CheckpointError("the chain head in the checkpoint is malformed; use an earlier checkpoint")
        try:
            return cls(int(str(number)), bytes.fromhex(str(digest)), int(str(tokens)), bytes.fromhex(str(revision)))
        except ValueError as error:
            raise CheckpointError("the chain head in the checkpoint is malformed; use an earlier checkpoint") from error


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def genesis_head(run_id: RunId) -> ChainHead:
    """Return the head of a run before its first round."""
    return ChainHead(0, hashlib.sha256(b"murmur genesis" + bytes.fromhex(run_id)).digest(), 0)


def extend_head(head: ChainHead, commit: Commit) -> ChainHead:
    """Return the head after a commit.

    Raises:
        StaleError: the commit does not continue this head.
    """
    if (commit.round, commit.base) != (head.round, head.digest):
        raise StaleError(f"a commit of round {commit.round} does not continue this chain at round {head.round}")
    digest = hashlib.sha256(head.digest + commit.content_digest).digest()
    return ChainHead(head.round + 1, digest, head.tokens + commit.tokens, commit.adoption.newest)


def prefers_theirs(mine: ChainHead, theirs: ChainHead) -> bool:
    """Return whether another chain is to replace that of this peer."""
    return (theirs.tokens, mine.digest) > (mine.tokens, theirs.digest)


def is_state_outvoted(
    chain_digest: Digest, state_digest: Digest, votes: Mapping[PeerId, tuple[Digest, Digest]]
) -> bool:
    """Return whether most peers at the same head of the chain hold another state than this peer.

    The state with the most votes is right; of several with equally many, the one with the lowest digest.

    Args:
        chain_digest: the head of this peer.
        state_digest: the state of this peer.
        votes: (chain digest, state digest) of every other live peer.
    """
    counts: dict[Digest, int] = {state_digest: 1}
    for their_chain, their_state in votes.values():
        if their_chain == chain_digest:
            counts[their_state] = counts.get(their_state, 0) + 1
    return min(counts, key=lambda candidate: (-counts[candidate], candidate)) != state_digest


class Chain:
    """The chain of one peer: its head, the voters of the next round, and the last commits, oldest first."""

    def __init__(self, head: ChainHead, electorate: Electorate, commits: Sequence[SignedMessage[Commit]] = ()) -> None:
        self.head = head
        self._electorates = [electorate]  # after each of the last rounds, as far as they are known
        self._commits = list(commits)[-MAX_KEPT_COMMITS:]

    @classmethod
    def from_genesis(cls, run_id: RunId, rule: AdmissionSection = OPEN) -> Self:
        """Start the chain of a run."""
        return cls(genesis_head(run_id), Electorate.at_genesis(rule))

    @property
    def round(self) -> int:
        """Return the number of decided rounds, which is that of the next round."""
        return self.head.round

    @property
    def digest(self) -> Digest:
        """Return the digest of the head."""
        return self.head.digest

    @property
    def tokens(self) -> int:
        """Return the tokens in all decided rounds."""
        return self.head.tokens

    @property
    def electorate(self) -> Electorate:
        """Return the voters of the next round."""
        return self._electorates[-1]

    def electorate_at(self, number: int) -> Electorate | None:
        """Return the voters of an earlier round, or None if they are no longer known."""
        missing = self.head.round - number
        return self._electorates[-1 - missing] if 0 <= missing < len(self._electorates) else None

    @property
    def kept_commits(self) -> tuple[SignedMessage[Commit], ...]:
        """Return the last commits, oldest first."""
        return tuple(self._commits)

    def append(self, commit: SignedMessage[Commit]) -> ChainHead:
        """Append a commit and return the new head.

        Raises:
            StaleError: the commit does not continue this chain.
        """
        self.head = extend_head(self.head, commit.body)
        self._electorates.append(self.electorate.after(commit.body))
        self._commits.append(commit)
        del self._electorates[: -MAX_KEPT_COMMITS - 1]
        del self._commits[:-MAX_KEPT_COMMITS]
        return self.head

    def switch_to(self, head: ChainHead, electorate: Electorate, commits: Sequence[SignedMessage[Commit]] = ()) -> None:
        """Switch to another chain, of which only the last commits are known, and the voters after its head."""
        self.head = head
        self._electorates = [electorate]
        self._commits = list(commits)[-MAX_KEPT_COMMITS:]

    def commits_since(self, number: int) -> tuple[SignedMessage[Commit], ...] | None:
        """Return the commits after the first `number` rounds, or None if some of them are no longer kept."""
        missing = self.head.round - number
        if not 0 <= missing <= len(self._commits):
            return None
        return tuple(self._commits[len(self._commits) - missing :])

    def head_after(self, commits: Sequence[SignedMessage[Commit]]) -> ChainHead:
        """Return the head after further commits, without appending them.

        Raises:
            StaleError: one of them does not continue the chain.
        """
        head = self.head
        for commit in commits:
            head = extend_head(head, commit.body)
        return head


def chain_to_json(head: ChainHead, electorate: Electorate) -> dict[str, Any]:
    """Return the head and the voters after it as they are stored in a checkpoint."""
    return {"head": head.to_json(), "electorate": electorate.to_json()}


def restore_chain(values: Mapping[str, Any], rule: AdmissionSection) -> Chain:
    """Return the chain in a checkpoint, without its commits. Raises CheckpointError."""
    head = ChainHead.from_json(values["head"])
    try:
        electorate = Electorate.from_json(values.get("electorate"), rule)
    except MalformedError as error:
        raise CheckpointError(f"the checkpoint has {error}; use an earlier checkpoint") from error
    if electorate.round != head.round:
        raise CheckpointError("the voters in the checkpoint are of another round; use an earlier checkpoint")
    return Chain(head, electorate)

"""The chain of commits; `fork_choice` says which one of two chains all peers prefer.

    digest(0)     = SHA-256("murmur genesis" + run id)
    digest(r + 1) = SHA-256(digest(r) + SHA-256(commit of round r, in canonical form and without its view))

The view is left out because it depends on the leader that proposed a commit, not on its content.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from protocol.consensus.history.certified import MAX_KEPT_COMMITS, CertifiedCommit, ChainLog, strong_after
from protocol.consensus.messages.contributions import Commit
from protocol.consensus.messages.signed import Digest
from protocol.electorate import OPEN, Electorate
from protocol.errors import CheckpointError, StaleError
from protocol.manifest.run import RunId
from protocol.manifest.sections import AdmissionSection
from protocol.signing import MAX_CHAIN_TOKENS
from protocol.steering import NO_REVISION


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
    tokens = min(head.tokens + commit.tokens, MAX_CHAIN_TOKENS)
    return ChainHead(head.round + 1, digest, tokens, commit.adoption.newest)


def _last_strong(strong: Electorate, log: ChainLog, first: int = 0) -> Electorate:
    """Return the electorate of the last strongly certified head after the commits from the index `first` on."""
    for before, entry in zip(log.electorates[first:], log.commits[first:], strict=False):
        strong = strong_after(strong, before, entry)
    return strong


class Chain:
    """The chain of one peer: its head, the electorate there, and the last commits with their certificates.

    Args:
        head: the head of the chain.
        log: the last commits; without any, only its electorate counts, which is that of the head.

    `strong_electorate`: the electorate of the last head that was certified strongly. If it is older than the head, a
    minority of its voters has carried the chain since then (a weak streak), however many rounds ago that was.
    """

    def __init__(self, head: ChainHead, log: ChainLog) -> None:
        self.head = head
        self._commits: list[CertifiedCommit] = []
        self._electorates: list[Electorate] = []  # before each commit, and at the head
        self._places: dict[Digest, int] = {}  # the round of each head
        self._replace(head, log)
        self.strong_electorate = log.strong or _last_strong(log.electorate, log)

    @classmethod
    def from_genesis(cls, run_id: RunId, rule: AdmissionSection = OPEN) -> Self:
        """Start the chain of a run."""
        return cls(genesis_head(run_id), ChainLog(Electorate.at_genesis(rule)))

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
        """Return the electorate of the next round."""
        return self._electorates[-1]

    @property
    def log(self) -> ChainLog:
        """Return all commits that are kept."""
        return ChainLog(self._electorates[0], tuple(self._commits), self.strong_electorate)

    @property
    def is_weak(self) -> bool:
        """Return whether a minority of the voters of an earlier head has carried the chain since then."""
        return self.strong_electorate.round < self.round

    def append(self, entry: CertifiedCommit) -> ChainHead:
        """Append a commit and return the new head.

        Raises:
            StaleError: the commit does not continue this chain.
        """
        self.head = extend_head(self.head, entry.body)
        self.strong_electorate = strong_after(self.strong_electorate, self.electorate, entry)
        self._commits.append(entry)
        self._electorates.append(self.electorate.after(entry.body))
        self._places[self.digest] = self.round
        if len(self._commits) > MAX_KEPT_COMMITS:
            del self._places[self._commits[0].body.base]
            del self._commits[0], self._electorates[0]
        return self.head

    def switch_to(self, head: ChainHead, log: ChainLog) -> None:
        """Switch to another chain, of which only the last commits are known."""
        self.strong_electorate = self._strong_electorate_of(head, log)
        self._replace(head, log)

    def _strong_electorate_of(self, head: ChainHead, log: ChainLog) -> Electorate:
        """Return the electorate of the last strongly certified head of another chain, as far as it is verified.

        A weak streak may go on there. Its certificates are verified from the last common head on; without one, only the
        newest is, and what the log says of earlier voters may be invented.
        """
        common = [number for number, entry in enumerate(log.commits) if self.has_head(entry.body.base)]
        if self.round == 0 or self.strong_electorate.round > head.round:
            return log.electorates[-1]
        if not common:
            return _last_strong(self.strong_electorate, log, max(0, len(log.commits) - 1))
        forked = self.electorate_at(log.commits[common[-1]].body.base)
        is_shared = self.strong_electorate.round <= forked.round
        return _last_strong(self.strong_electorate if is_shared else forked, log, common[-1])

    def _replace(self, head: ChainHead, log: ChainLog) -> None:
        self.head = head
        commits, electorates = log.commits[-MAX_KEPT_COMMITS:], log.electorates
        self._commits = list(commits)
        self._electorates = list(electorates[len(electorates) - len(commits) - 1 :])
        self._places = {entry.body.base: entry.body.round for entry in commits} | {head.digest: head.round}

    def has_head(self, digest: Digest) -> bool:
        """Return whether the chain had this head, as far as its commits are kept."""
        return digest in self._places

    def electorate_at(self, digest: Digest) -> Electorate:
        """Return the electorate at a head that `has_head` knows."""
        return self._electorates[self._places[digest] - self.round - 1]

    def log_since(self, number: int) -> ChainLog | None:
        """Return the commits after the first `number` rounds, or None if some of them are no longer kept."""
        missing = self.head.round - number
        if not 0 <= missing <= len(self._commits):
            return None
        first = len(self._commits) - missing
        return ChainLog(self._electorates[first], tuple(self._commits[first:]))

    def commits_since(self, number: int) -> tuple[CertifiedCommit, ...] | None:
        """Return the same without the electorate."""
        log = self.log_since(number)
        return None if log is None else log.commits

    def head_after(self, commits: Sequence[CertifiedCommit]) -> ChainHead:
        """Return the head after further commits, without appending them.

        Raises:
            StaleError: one of them does not continue the chain.
        """
        head = self.head
        for entry in commits:
            head = extend_head(head, entry.body)
        return head

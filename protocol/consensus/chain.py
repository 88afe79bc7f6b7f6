"""The chain of commits, and the certificates that decided them; `fork_choice` chooses between two chains.

    digest(0)     = SHA-256("murmur genesis" + run id)
    digest(r + 1) = SHA-256(digest(r) + SHA-256(commit of round r, in canonical form and without its view))

The view is left out because it depends on the leader that proposed a commit, not on its content.

Peers keep, store and serve commits with their certificates. A kept certificate holds the acknowledgements of the first
peers, in the order of their ids, that are a quorum of all voters. If fewer voters have acknowledged the commit, because
the others were gone, it holds those of all of them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from protocol import murmur_pb2 as wire
from protocol.consensus.messages.contributions import Commit, ContributionLimits
from protocol.consensus.messages.kinds import Acknowledgement, CommitCertificate
from protocol.consensus.messages.signed import Digest, OpenNested, SignedMessage, check_count
from protocol.electorate import OPEN, Electorate
from protocol.errors import CheckpointError, MalformedError, StaleError
from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.manifest.sections import AdmissionSection
from protocol.signing import MAX_CHAIN_TOKENS
from protocol.steering import NO_REVISION

MAX_KEPT_COMMITS = 64


@dataclass(frozen=True)
class CertifiedCommit:
    """A decided commit, and the certificate that proves the decision."""

    commit: SignedMessage[Commit]
    certificate: CommitCertificate

    @property
    def body(self) -> Commit:
        return self.commit.body

    @property
    def signers(self) -> frozenset[PeerId]:
        """Return the peers whose acknowledgements decided the commit."""
        return self.certificate.signers


def build_certificate(
    votes: Mapping[PeerId, SignedMessage[Acknowledgement]], electorate: Electorate
) -> CommitCertificate:
    """Return the certificate to keep: a quorum of all voters if they confirmed, else every voter that did.

    Acknowledgements are kept all, because only those of all voters decide; see `locks`.

    Args:
        votes: the acknowledgements or the confirmations of one proposal, by sender.
        electorate: that before the round.
    """
    entitled = sorted(votes.keys() & electorate.voters)
    is_fast = electorate.may_lie and any(vote.body.content and not vote.body.confirms for vote in votes.values())
    quorum = entitled if is_fast else entitled[: electorate.quorum_size(len(electorate.voters))]
    return CommitCertificate.of([votes[peer] for peer in quorum or sorted(votes)])


def counted_signers(entry: CertifiedCommit, electorate: Electorate) -> frozenset[PeerId]:
    """Return the signers of a certificate that count.

    Where voters may lie, the acknowledgements of a quorum do not decide (`locks`): then one fewer counts than a quorum.
    Certificates of earlier versions name no content; there a quorum decided.
    """
    certificate, voters = entry.certificate, electorate.voters
    is_decision = certificate.confirms or not certificate.content or not electorate.may_lie
    if is_decision or voters <= entry.signers:
        return entry.signers
    kept = sorted(entry.signers & voters)[: electorate.quorum_size(len(voters)) - 1]
    return (entry.signers - voters).union(kept)


@dataclass(frozen=True)
class ChainLog:
    """Consecutive commits with their certificates, and the electorate before the first one.

    Without commits, `electorate` is that of the head. `strong`: that of the last head which was certified strongly, as
    the owner of the chain remembers it; it stays on its disk, and what others say of it does not count.
    """

    electorate: Electorate
    commits: tuple[CertifiedCommit, ...] = ()
    strong: Electorate | None = field(default=None, compare=False)

    @cached_property
    def electorates(self) -> tuple[Electorate, ...]:
        """Return the electorate before each commit, and the one after the last."""
        found = [self.electorate]
        for entry in self.commits:
            found.append(found[-1].after(entry.body))
        return tuple(found)

    def since(self, round_number: int) -> "ChainLog":
        """Return the log from the commit of that round on, which is in it or follows its last one."""
        index = round_number - self.commits[0].body.round if self.commits else 0
        return ChainLog(self.electorates[index], self.commits[index:])

    def to_wire(self, max_bytes: int | None = None) -> wire.ChainLog:
        """Return the log on the wire: of its commits the oldest ones that fit, at least one."""
        log = wire.ChainLog(electorate=self.electorate.to_bytes())
        size = 0
        for entry in self.commits:
            certificate = entry.certificate.to_wire()
            size += entry.commit.signed.ByteSize() + certificate.ByteSize()
            if max_bytes is not None and log.commits and size > max_bytes:
                break
            log.commits.append(entry.commit.signed)
            log.certificates.append(certificate)
        return log

    @classmethod
    def from_wire(
        cls, log: wire.ChainLog, rule: AdmissionSection, limits: ContributionLimits, open_nested: OpenNested
    ) -> Self:
        """Return the checked log. Raises PeerFault.

        Args:
            rule: the run's rule of admission.
            limits: those of the run's contributions.
            open_nested: checks one message of the log.
        """
        check_count(len(log.commits), MAX_KEPT_COMMITS, "commits")
        if len(log.commits) != len(log.certificates):
            raise MalformedError(f"{len(log.commits)} commits with {len(log.certificates)} certificates")
        electorate = Electorate.from_bytes(log.electorate, rule)
        pairs = zip(log.commits, log.certificates, strict=True)
        return cls(electorate, tuple(_open_pair(*pair, limits, open_nested) for pair in pairs))


def open_certified(log: wire.ChainLog, limits: ContributionLimits, open_nested: OpenNested) -> CertifiedCommit:
    """Return the only commit of a log, checked. Raises PeerFault."""
    if len(log.commits) != 1 or len(log.certificates) != 1:
        raise MalformedError(f"{len(log.commits)} commits with {len(log.certificates)} certificates instead of one")
    return _open_pair(log.commits[0], log.certificates[0], limits, open_nested)


def _open_pair(
    signed: wire.Signed, decision: wire.Decision, limits: ContributionLimits, open_nested: OpenNested
) -> CertifiedCommit:
    commit = open_nested(signed)
    if not isinstance(commit.body, Commit):
        raise MalformedError("the chain has messages that are not commits")
    return certified(commit, CommitCertificate.from_wire(decision, limits, open_nested))


def certified(commit: SignedMessage[Commit], certificate: CommitCertificate) -> CertifiedCommit:
    """Return the pair. Raises MalformedError if the certificate is that of another commit."""
    expected = (commit.body.round, commit.body.view, commit.digest)
    if (certificate.round, certificate.view, certificate.proposal) != expected:
        raise MalformedError(f"the certificate of the commit of round {commit.body.round} is that of another one")
    return CertifiedCommit(commit, certificate)


def strong_after(strong: Electorate, before: Electorate, entry: CertifiedCommit) -> Electorate:
    """Return the electorate of the last head that is certified strongly, after one more commit.

    A quorum of that electorate certifies the new head; so does a quorum of the voters of the round, once they are as
    many: then those that vanished no longer have a say.

    Args:
        strong: the electorate of that head before the commit.
        before: the electorate of the round.
        entry: the commit.
    """
    signers = counted_signers(entry, before)
    is_replaced = len(before.voters) >= len(strong.voters) and before.is_certified_by(signers)
    return before.after(entry.body) if is_replaced or strong.is_certified_by(signers) else strong


def count_weakest(log: ChainLog, voters: frozenset[PeerId]) -> int:
    """Return how many of the voters decided the commit that the fewest of them did."""
    pairs = zip(log.commits, log.electorates, strict=False)
    return min(len(counted_signers(entry, before) & voters) for entry, before in pairs)


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

"""Commits with the certificates that decided them, as peers keep, store and serve them.

A kept certificate holds the acknowledgements of the first peers, in the order of their ids, that are a quorum of all
voters. If fewer voters have acknowledged the commit, because the others were gone, it holds those of all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from protocol import murmur_pb2 as wire
from protocol.consensus.messages.checks import check_count
from protocol.consensus.messages.contributions import Commit, ContributionLimits
from protocol.consensus.messages.kinds import Acknowledgement, CommitCertificate
from protocol.consensus.messages.signed import OpenNested, SignedMessage
from protocol.electorate import Electorate
from protocol.errors import MalformedError
from protocol.identity import PeerId
from protocol.manifest.sections import AdmissionSection

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
    """Return the certificate to keep: a quorum of all voters if they acknowledged, else every voter that did.

    Args:
        votes: the acknowledgements of one proposal, by sender.
        electorate: that before the round.
    """
    entitled = sorted(votes.keys() & electorate.voters)
    quorum = entitled[: electorate.quorum_size(len(electorate.voters))]
    return CommitCertificate.of([votes[peer] for peer in quorum or sorted(votes)])


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
    is_replaced = len(before.voters) >= len(strong.voters) and before.is_certified_by(entry.signers)
    return before.after(entry.body) if is_replaced or strong.is_certified_by(entry.signers) else strong


def count_weakest(commits: Sequence[CertifiedCommit], voters: frozenset[PeerId]) -> int:
    """Return how many of the voters acknowledged the commit that the fewest of them did."""
    return min(len(entry.signers & voters) for entry in commits)

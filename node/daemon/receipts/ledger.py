"""Add up the commits of a run: the counted work of each peer, and the rounds whose commits are missing.

A ledger reads the commits in order. It refuses a commit that does not continue the chain, so the tokens of all peers
and those of the gaps always add up to the tokens of the head. It refuses a certificate that names other voters or
tokens than the commits before. It counts the rounds in which fewer than a quorum of all voters acknowledged the commit:
voters that were absent for long do not count in a round, but the commits alone do not show who was absent.

Anybody can write a chain of keys that nobody knows. So a ledger also says from which round on nothing
binds the chain (`unbound_from`): voters that the manifest fixes, or a trust point, have to lead to its end.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path

from node.daemon.receipts.commit_file import (
    CommitFileHeader,
    CutRecordError,
    DamagedRecordError,
    Start,
    open_commit_file,
    read_header,
    read_records,
)
from protocol import murmur_pb2 as wire
from protocol.consensus.chain import (
    CertifiedCommit,
    ChainHead,
    counted_signers,
    extend_head,
    genesis_head,
    open_certified,
)
from protocol.consensus.messages.contributions import Commit, Contribution
from protocol.consensus.messages.kinds import nested_parser, nested_reader
from protocol.consensus.messages.signed import SignedMessage
from protocol.electorate import Electorate
from protocol.errors import PeerFault, ReceiptError
from protocol.identity import PeerId
from protocol.rollout_credits import RolloutCredit
from protocol.signing import TrustPoint


@dataclass(frozen=True)
class CountedWork:
    """One included contribution, its counted tokens, and the chain digest after its commit."""

    round: int
    tokens: int
    contribution: SignedMessage[Contribution]
    chain_digest: bytes


@dataclass(frozen=True)
class CountedRollouts:
    """The groups of one maker that a commit counts, by the trainers that learned from them."""

    round: int
    by_trainer: tuple[tuple[PeerId, RolloutCredit], ...]
    chain_digest: bytes

    @property
    def groups(self) -> int:
        return sum(credit.groups for _, credit in self.by_trainer)

    @property
    def tokens(self) -> int:
        return sum(credit.tokens for _, credit in self.by_trainer)


@dataclass
class PeerAccount:
    """The counted work of one peer: as a trainer, and as a maker of rollouts that trainers learned from."""

    tokens: int = 0
    rounds: int = 0
    size: int = 0  # bytes of the parts of its contributions
    first_round: int = 0
    last_round: int = 0
    groups: int = 0
    rollout_tokens: int = 0
    rollout_rounds: int = 0


@dataclass(frozen=True)
class Segment:
    """Consecutive commits, from the head before the first one to the head after the last one."""

    start: ChainHead
    end: ChainHead


class RunLedger:
    """Adds up commits.

    Args:
        header: the run of the commits.
        followed: the peers whose single contributions are kept; `None` means all peers.
        trust: a point of the chain for which a person vouches.
    """

    def __init__(
        self,
        header: CommitFileHeader,
        followed: Set[PeerId] | None = frozenset(),
        trust: TrustPoint | None = None,
    ) -> None:
        self.header = header
        self.accounts: dict[PeerId, PeerAccount] = {}
        self.works: dict[PeerId, list[CountedWork]] = {}
        self.rollouts: dict[PeerId, list[CountedRollouts]] = {}
        self.segments: list[Segment] = []
        self.head = genesis_head(header.run_id)
        self.electorate = Electorate.at_genesis(header.rule)
        self.thin_rounds = 0  # with fewer acknowledgements than a quorum of all voters
        self.unbound_from: int | None = None  # the first round that nothing binds to the manifest or the trust point
        self.passes_trust = False
        self._trust = trust
        self._followed = followed

    @property
    def tokens(self) -> int:
        return sum(account.tokens for account in self.accounts.values())

    @property
    def missing_tokens(self) -> int:
        return self.head.tokens - self.tokens

    @property
    def missing_rounds(self) -> int:
        return self.head.round - sum(segment.end.round - segment.start.round for segment in self.segments)

    def take(self, content: Start | wire.ChainLog, open_commit: "OpenCommit") -> None:
        """Handle the content of a record. Raises ReceiptError, and the PeerFault of an invalid commit."""
        if isinstance(content, Start):
            self.start(content)
        else:
            self.add(open_commit(content))

    def start(self, start: Start) -> None:
        """Continue at a head. Raises ReceiptError unless the head is the genesis, or follows a gap."""
        rounds, tokens = start.head.round - self.head.round, start.head.tokens - self.head.tokens
        is_genesis = not self.segments and start == Start(self.head, self.electorate)
        if not (is_genesis or 0 < rounds <= tokens):
            raise ReceiptError(
                f"the commits jump from round {self.head.round} to {start.head.round}, which is not later"
            )
        if not is_genesis:
            self._unbind()
        self.segments.append(Segment(start.head, start.head))
        self.head, self.electorate = start.head, start.electorate

    def add(self, entry: CertifiedCommit) -> None:
        """Count a commit. Raises ReceiptError if the commit or its certificate does not continue the chain."""
        try:
            after = extend_head(self.head, entry.body)
        except PeerFault as fault:
            raise ReceiptError(f"the commits do not follow one another after round {self.head.round}") from fault
        basis = entry.certificate.basis
        if (basis.voters, basis.tokens) != (self.electorate.digest, self.head.tokens):
            raise ReceiptError(
                f"the certificate of round {self.head.round} names other voters or tokens than its chain"
            )
        self.thin_rounds += not self._is_certified(entry)
        self._bind(entry)
        if not self.segments:
            self.segments.append(Segment(self.head, self.head))
        self.segments[-1] = Segment(self.segments[-1].start, after)
        self.head, self.electorate = after, self.electorate.after(entry.body)
        for contribution in entry.body.contributions:
            tokens = entry.body.counted_tokens[contribution.sender]
            self._count(CountedWork(entry.body.round, tokens, contribution, after.digest))
        self._count_rollouts(entry.body, after.digest)

    def _is_certified(self, entry: CertifiedCommit) -> bool:
        """Return whether a quorum of all voters acknowledged a commit; the first commit has no voters."""
        return self.electorate.is_certified_by(counted_signers(entry, self.electorate)) or not self.electorate.voters

    def _bind(self, entry: CertifiedCommit) -> None:
        """Follow whether voters that nobody can make up carry the chain on."""
        head, voters = self.head, self.electorate.voters
        if self._trust == TrustPoint.of(head.round, head.digest, entry.certificate.basis.state, self.electorate.digest):
            self.unbound_from, self.passes_trust = None, True
        if (
            not voters and self.header.rule.mode == "tickets"
        ):  # the organiser chose the contributors of the first commit
            voters = self.electorate.after(entry.body).voters
        if not 3 * len(entry.signers & voters) > len(voters):  # one of them was honest, or nobody has a vote
            self._unbind()

    def _unbind(self) -> None:
        if self.unbound_from is None:
            self.unbound_from = self.head.round

    def _count(self, work: CountedWork) -> None:
        peer = work.contribution.sender
        account = self.accounts.setdefault(peer, PeerAccount(first_round=work.round))
        account.tokens += work.tokens
        account.rounds += 1
        account.size += sum(blob.size for blob in work.contribution.body.parts)
        account.last_round = work.round
        if self._followed is None or peer in self._followed:
            self.works.setdefault(peer, []).append(work)

    def _count_rollouts(self, commit: Commit, digest: bytes) -> None:
        by_maker = dict[PeerId, list[tuple[PeerId, RolloutCredit]]]()
        for trainer, credited in commit.counted_credits.items():
            for credit in credited:
                by_maker.setdefault(credit.maker, []).append((trainer, credit))
        for maker, found in by_maker.items():
            counted = CountedRollouts(commit.round, tuple(found), digest)
            account = self.accounts.setdefault(maker, PeerAccount(first_round=commit.round))
            account.groups += counted.groups
            account.rollout_tokens += counted.tokens
            account.rollout_rounds += 1
            account.last_round = commit.round
            if self._followed is None or maker in self._followed:
                self.rollouts.setdefault(maker, []).append(counted)


OpenCommit = Callable[[wire.ChainLog], CertifiedCommit]


def commit_verifier(header: CommitFileHeader) -> OpenCommit:
    """Return a function that checks a commit, its certificate, and all signatures in them. It raises PeerFault."""
    limits = header.limits()
    return lambda log: open_certified(log, limits, nested_parser(header.run_id, limits))


def commit_reader(header: CommitFileHeader) -> OpenCommit:
    """Return a function that reads a commit of our own file, whose signatures were checked before it was written."""
    limits = header.limits()
    return lambda log: open_certified(log, limits, nested_reader(limits))


def read_ledger(
    path: Path,
    open_commit: Callable[[CommitFileHeader], OpenCommit],
    followed: Set[PeerId] | None = frozenset(),
    up_to_round: int | None = None,
    trust: TrustPoint | None = None,
) -> RunLedger:
    """Add up the commits of a file, up to the head of `up_to_round` if it is given.

    Raises MissingFileError, and ReceiptError with the reason if the file is not a chain of commits.
    """
    with open_commit_file(path) as file:
        header = read_header(file, path)
        ledger = RunLedger(header, followed, trust)
        try:
            checked = open_commit(header)
            for record in read_records(file, header.rule):
                ledger.take(record.content, checked)
                if ledger.head.round == up_to_round:
                    break
        except DamagedRecordError as error:
            raise ReceiptError(f"{path} is damaged after round {ledger.head.round}: {error}") from error
        except CutRecordError as error:
            raise ReceiptError(f"{path} is cut off after round {ledger.head.round}; get it again") from error
        except PeerFault as fault:
            raise ReceiptError(f"{path}: the commit of round {ledger.head.round} is not valid: {fault}") from fault
    return ledger

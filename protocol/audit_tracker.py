"""Decide where the findings of audits lead: to a larger panel, strikes, or the exclusion of a key. PURE.

*Word and evidence.* A finding is the word of one key, and a few keys may lie together. So the first panel of three
only sets peers aside for a while: the audited peer if most of it found a difference, the accusers if most of it found
none. Only the findings of two thirds of the voters exclude a key: fewer than a third of them lie, so at least a third
of them are honest peers that repeated the work.

*Panels grow.* Only the first auditor repeats a contribution unasked. A difference lets the rest of its panel repeat the
work too. Once most of a panel agree, or after GROWTH_ROUNDS without that, the panel grows: from 3 to 9, then to all
voters. A larger panel that contradicts a smaller one takes its strikes back. An accusation costs a key: two thirds that
find a difference exclude the audited peer, and two thirds that find none exclude those that invented one, because their
signed finding is false. An auditor that finds no difference where others find one is only set aside.

An auditor with another kind of device cannot compare bits. It says "similar" where it finds no difference beyond that
of devices, which sets accusers aside, but excludes nobody: they may have seen a smaller lie.

Every peer on the chain knows the auditors and their order, so all that receive the same findings decide the same.

A peer that serves neither the record nor the state, or whose work nobody can repeat, lies as little as one whose link
is down. It gets a strike once that happens MAX_MISSES times in a row.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

from protocol.audits import Audit, AuditDraw, AuditKey, SignedFinding, Verdict, draw_audits
from protocol.blobs.blob import Blob
from protocol.conduct import PeerConvicted
from protocol.consensus.chain import Chain
from protocol.consensus.messages.contributions import Commit
from protocol.consensus.messages.signed import SignedMessage
from protocol.errors import StaleError
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed

PANELS: Final = (3, 9)  # then all voters
GROWTH_ROUNDS = 2  # after which a panel grows without the word of those that keep silent
KEPT_ROUNDS = 64
HELD_ROUNDS = 16  # for so long the first panel keeps what a repetition needs, and all do once there is a finding
HELD_BY_OTHERS = 4
MAX_MISSES = 3
MAX_COUNTED_PEERS = 4096
MAX_EARLY_ROUNDS = 2
MAX_EARLY_FINDINGS = 256
Offence = Literal[
    "audit: lied", "audit: doubted", "audit: not served", "audit: not auditable", "audit: false finding"
]  # fmt: skip
_FALSE: Final[Offence] = "audit: false finding"
_DOUBTED: Final[Offence] = "audit: doubted"
_MISSES: Final[Mapping[Verdict, Offence]] = MappingProxyType(
    {"not served": "audit: not served", "not auditable": "audit: not auditable"}
)
NOTHING_KNOWN: Final[Mapping[PeerId, Blob | None]] = MappingProxyType({})


def votes_to_convict(voters: int) -> int:
    """Count the findings that exclude a key: those of two thirds of the voters."""
    return -(-2 * voters // 3)


def proves(conviction: PeerConvicted, findings: Sequence[SignedFinding], contribution: SignedMessage[Any]) -> bool:
    """Return whether the checked findings of a conviction are those of two thirds of its voters.

    `contribution`: the one that they judge, with the signature of the audited peer.
    """
    voters, audited = conviction.voters, contribution.sender
    about = {(each.body.audited, each.body.contribution) for each in findings}
    if not voters or about != {(audited, contribution.digest)} or len({each.body.chain for each in findings}) != 1:
        return False
    say: dict[Verdict, set[PeerId]] = {"different": set(), "equal": set()}
    for each in findings:
        say.get(each.body.verdict, set()).add(each.auditor)
    needed = votes_to_convict(len(voters))
    if conviction.offence == "audit: lied":
        return conviction.peer == audited and len(say["different"] & voters) >= needed
    is_accuser = conviction.offence == _FALSE and conviction.peer in say["different"] - say["equal"]
    return is_accuser and len(say["equal"] & voters - {audited}) + (audited in voters) >= needed


@dataclass(frozen=True)
class RepeatWork:
    """We are to repeat a contribution; another auditor found a difference in it if it `is_disputed`.

    `last_work` is the record of the peer's last contribution in the chain, if known.
    """

    audit: Audit
    last_work: Blob | None = None
    is_disputed: bool = False


@dataclass(frozen=True)
class PeerStruck:
    """A peer did something that honest peers do rarely."""

    peer: PeerId
    reason: Offence


@dataclass(frozen=True)
class PeerCleared:
    """A larger panel takes back what a smaller one said of a peer."""

    peer: PeerId


Consequence = RepeatWork | PeerConvicted | PeerStruck | PeerCleared


@dataclass
class _Case:
    """One audit and its findings; `size` is that of its panel since the round `grown_at`."""

    audit: Audit
    round: int
    last_work: Blob | None
    grown_at: int
    size: int = PANELS[0]
    findings: dict[PeerId, SignedFinding] = field(default_factory=dict)
    is_repeating: bool = False
    struck: frozenset[PeerId] = frozenset()  # by the word of the panel
    convicted: set[PeerId] = field(default_factory=set)

    @property
    def panel(self) -> tuple[PeerId, ...]:
        return self.audit.auditors[: self.size]

    @property
    def is_disputed(self) -> bool:
        """Return whether a member of the panel found a difference, and nobody is convicted for it yet."""
        return bool(self.findings) and bool(self.who_say("different")) and not self.convicted

    def who_say(self, *verdicts: Verdict) -> list[PeerId]:
        """Return the members of the panel with one of these verdicts, in their order."""
        return [peer for peer in self.panel if peer in self.findings and self.findings[peer].body.verdict in verdicts]

    def grow(self, round_number: int) -> None:
        self.size = next((size for size in PANELS if size > self.size), max(self.size, len(self.audit.auditors)))
        self.grown_at = round_number

    def proof(self, *verdicts: Verdict) -> tuple[Signed, ...]:
        return tuple(self.findings[peer].signed for peer in self.who_say(*verdicts))


class AuditTracker:
    """The audits that one peer knows of."""

    def __init__(self, peer_id: PeerId) -> None:
        self._peer_id = peer_id
        self._cases: dict[AuditKey, _Case] = {}
        self._misses: Counter[PeerId] = Counter()
        self._round = -1
        self._early: dict[tuple[PeerId, *AuditKey], SignedFinding] = {}  # of rounds that we have not applied yet

    def open_round(self, chain: Chain, share: float) -> list[Consequence]:
        """Draw the audits of the last commit but one of our chain, by the newest; return those that are ours."""
        log = chain.log
        if len(log.commits) < 2:
            return []
        *earlier, commit, newest = (entry.body for entry in log.commits)
        draw, voters = AuditDraw.of(commit, newest), log.electorates[-2].voters
        return self.open(
            commit.round, draw_audits(commit, newest.base, draw, share, voters), last_work_by_peer(earlier)
        )

    def open(
        self, round_number: int, audits: Sequence[Audit], last_work: Mapping[PeerId, Blob | None] = NOTHING_KNOWN
    ) -> list[Consequence]:
        """Take the audits of a decided round; return those that are ours, and the consequences that are due."""
        self._round = round_number
        self._forget(round_number - KEPT_ROUNDS)
        overdue = [entry for case in self._cases.values() if case.is_disputed for entry in self._judge(case)]
        ours: list[Consequence] = []
        for audit in audits:
            peer = audit.contribution.sender
            new = _Case(audit, round_number, last_work.get(peer), round_number)
            case = self._cases.setdefault((audit.chain, peer), new)
            if audit.auditors[:1] == (self._peer_id,) and not case.is_repeating:
                case.is_repeating = True
                ours.append(RepeatWork(audit, case.last_work))
        return [*overdue, *ours, *self._learn_early()]

    def _forget(self, round_number: int) -> None:
        """Forget the audits up to a round; they are in the order of their rounds."""
        while self._cases and self._cases[oldest := next(iter(self._cases))].round <= round_number:
            del self._cases[oldest]

    def _learn_early(self) -> list[Consequence]:
        due = [key for key, finding in self._early.items() if finding.body.round <= self._round]
        found = [finding for key in due if self._is_known(finding := self._early.pop(key))]
        return [consequence for finding in found for consequence in self._learn(finding)]

    @property
    def round(self) -> int:
        """Return the newest round whose audits are drawn."""
        return self._round

    @property
    def our_audits(self) -> frozenset[AuditKey]:
        """Return the audits that we may still have to repeat."""
        ours = ((key, case) for key, case in self._cases.items() if self._peer_id in case.audit.auditors)
        return frozenset(key for key, case in ours if self._is_held(case))

    def _is_held(self, case: _Case) -> bool:
        if case.is_disputed:
            return case.grown_at > self._round - HELD_ROUNDS
        is_first = self._peer_id in case.audit.auditors[: PANELS[0]]
        return case.round > self._round - (HELD_ROUNDS if is_first else HELD_BY_OTHERS)

    def is_published(self, audit: Audit, verdict: Verdict) -> bool:
        """Return whether our verdict concerns the others: a difference does, and any answer to one."""
        case = self._cases.get((audit.chain, audit.contribution.sender))
        return verdict == "different" or (case is not None and bool(case.findings))

    def note_verdict(self, audit: Audit, verdict: Verdict) -> list[Consequence]:
        """Count what we found ourselves."""
        peer = audit.contribution.sender
        if verdict not in _MISSES:
            self._misses.pop(peer, None)
            return []
        if len(self._misses) >= MAX_COUNTED_PEERS:
            self._misses.clear()
        self._misses[peer] += 1
        if self._misses[peer] < MAX_MISSES:
            return []
        del self._misses[peer]
        return [PeerStruck(peer, _MISSES[verdict])]

    def learn(self, finding: SignedFinding) -> list[Consequence]:
        """Take a finding, our own included. Raises StaleError if its sender does not audit that contribution."""
        body = finding.body
        if self._round < body.round <= self._round + MAX_EARLY_ROUNDS and len(self._early) < MAX_EARLY_FINDINGS:
            self._early.setdefault((finding.auditor, body.chain, body.audited), finding)
            return []
        if not self._is_known(finding):
            raise StaleError(f"{finding.auditor} reports on a contribution that it does not audit")
        return self._learn(finding)

    def _is_known(self, finding: SignedFinding) -> bool:
        """Return whether its auditor was drawn for that contribution."""
        case = self._cases.get((finding.body.chain, finding.body.audited))
        if case is None or finding.auditor not in case.audit.auditors:
            return False
        return finding.body.contribution == case.audit.contribution.digest

    def _learn(self, finding: SignedFinding) -> list[Consequence]:
        case = self._cases[finding.body.chain, finding.body.audited]
        if finding.auditor in case.findings:
            return []
        if not case.who_say("different"):
            case.grown_at = self._round
        case.findings[finding.auditor] = finding
        return self._judge(case)

    def _judge(self, case: _Case) -> list[Consequence]:
        """Return what the findings of a panel lead to, and let it grow as far as they allow."""
        consequences: list[Consequence] = []
        while case.who_say("different"):
            consequences += [*self._convict(case), *self._set_aside(case), *self._join(case)]
            is_slow = self._round >= case.grown_at + GROWTH_ROUNDS
            if case.convicted or case.size >= len(case.audit.auditors) or not (_word(case) or is_slow):
                break
            case.grow(self._round)
        return consequences

    def _join(self, case: _Case) -> list[Consequence]:
        """Repeat the work if we belong to the panel by now."""
        if case.is_repeating or case.convicted or self._peer_id not in case.panel:
            return []
        case.is_repeating = True
        return [RepeatWork(case.audit, case.last_work, is_disputed=True)]

    def _convict(self, case: _Case) -> list[Consequence]:
        audited, voters, accusers = case.audit.contribution.sender, case.audit.voters, case.who_say("different")
        needed = votes_to_convict(len(voters))
        if not needed:  # nobody has a vote yet
            return []
        if len(accusers) >= needed:
            return self._convict_all(case, [audited], "audit: lied", "different")
        # With its contribution the audited peer has signed that it did this work.
        if len(case.who_say("equal")) + (audited in voters) >= needed:
            return self._convict_all(case, accusers, _FALSE, "equal", "different")
        return []

    def _convict_all(
        self, case: _Case, peers: Sequence[PeerId], offence: Offence, *verdicts: Verdict
    ) -> list[Consequence]:
        new = [peer for peer in peers if peer not in case.convicted]
        case.convicted.update(new)
        if offence == _FALSE:
            self._ignore(new)
        proof, voters, contribution = case.proof(*verdicts), case.audit.voters, case.audit.contribution.signed
        return [PeerConvicted(peer, offence, case.round, proof, voters, contribution) for peer in new]

    def _ignore(self, liars: Sequence[PeerId]) -> None:
        """Forget what liars found elsewhere, so that nobody repeats work for their sake."""
        for case in self._cases.values():
            for liar in set(liars) - case.convicted:
                case.findings.pop(liar, None)

    def _set_aside(self, case: _Case) -> list[Consequence]:
        """Set those aside that most of the panel contradict, and clear those that a smaller one struck."""
        word = _word(case)
        if word is None:
            return []
        wrong: dict[PeerId, Offence] = dict.fromkeys(
            case.who_say("equal" if word == "different" else "different"), _FALSE
        )
        aside = wrong | {case.audit.contribution.sender: _DOUBTED} if word == "different" else wrong
        struck = [PeerStruck(peer, reason) for peer, reason in aside.items() if peer not in case.struck]
        cleared = [PeerCleared(peer) for peer in sorted(case.struck - aside.keys())]
        case.struck = frozenset(aside)
        return [*struck, *cleared]


def _word(case: _Case) -> Verdict | None:
    """Return the verdict of most of a panel, at least two of it; None if there is none yet."""
    least = max(2, len(case.panel) // 2 + 1)
    if len(case.who_say("different")) >= least:
        return "different"
    return "equal" if len(case.who_say("equal", "similar")) >= least else None


def last_work_by_peer(commits: Sequence[Commit]) -> dict[PeerId, Blob | None]:
    """Return the work record of the last contribution of each peer in these commits."""
    return {entry.sender: entry.body.work for commit in commits for entry in commit.contributions}

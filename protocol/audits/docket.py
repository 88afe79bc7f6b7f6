"""Keep the audits of the last rounds, and decide what follows from the findings. PURE.

The first auditor of a contribution repeats it, and says nothing if it agrees. If it finds a difference, it publishes a
finding, and the next two auditors repeat the contribution too. Two of the three decide: that the audited peer lied,
which excludes its key, or that the first auditor did, which is a strike against it. Everybody on the chain knows who
the auditors are, so everybody comes to the same decision.

A peer that serves neither the record nor the state, or whose work nobody can repeat, lies as little as one whose link
is down. It gets a strike once that happens MAX_MISSES times in a row.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

from protocol.audits.draw import Audit, AuditKey, draw_audits
from protocol.audits.findings import SignedFinding, Verdict
from protocol.blobs.blob import Blob
from protocol.consensus.history.chain import Chain
from protocol.consensus.messages.contributions import Commit
from protocol.errors import StaleError
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed

MAJORITY = 2  # of the three auditors of a contribution
KEPT_ROUNDS = 64
HELD_ROUNDS = 16  # for so long an auditor keeps what a repetition needs, and longer once there is a finding
MAX_MISSES = 3
MAX_COUNTED_PEERS = 4096
MAX_EARLY_ROUNDS = 2
MAX_EARLY_FINDINGS = 256
Offence = Literal["audit: lied", "audit: not served", "audit: not auditable", "audit: false finding"]
_MISSES: Final[Mapping[Verdict, Offence]] = MappingProxyType(
    {"not served": "audit: not served", "not auditable": "audit: not auditable"}
)
NOTHING_KNOWN: Final[Mapping[PeerId, Blob | None]] = MappingProxyType({})


@dataclass(frozen=True)
class RepeatWork:
    """We are to repeat a contribution; another auditor found a difference in it if it `is_disputed`.

    `last_work` is the record of the peer's last contribution in the chain, if known.
    """

    audit: Audit
    last_work: Blob | None = None
    is_disputed: bool = False


@dataclass(frozen=True)
class PeerLied:
    """A majority of the auditors found a difference in a contribution of `round`; `findings` is the proof."""

    peer: PeerId
    round: int
    findings: tuple[Signed, ...]


@dataclass(frozen=True)
class PeerStruck:
    """A peer did something that honest peers do rarely."""

    peer: PeerId
    reason: Offence


Consequence = RepeatWork | PeerLied | PeerStruck


@dataclass
class _Case:
    audit: Audit
    round: int
    last_work: Blob | None
    findings: dict[PeerId, SignedFinding] = field(default_factory=dict)
    is_repeating: bool = False
    is_decided: bool = False

    def count(self, verdict: Verdict) -> int:
        return sum(finding.body.verdict == verdict for finding in self.findings.values())


class Docket:
    """The audits that one peer knows of."""

    def __init__(self, peer_id: PeerId) -> None:
        self._peer_id = peer_id
        self._cases: dict[AuditKey, _Case] = {}
        self._misses: Counter[PeerId] = Counter()
        self._round = -1
        self._early: dict[tuple[PeerId, *AuditKey], SignedFinding] = {}  # of rounds that we have not applied yet

    def open_round(self, chain: Chain, share: float) -> list[Consequence]:
        """Draw the audits of the newest commit of our chain; return those that are ours."""
        if not chain.log.commits:
            return []
        *earlier, newest = (commit.body for commit in chain.log.commits)
        audits = draw_audits(newest, chain.digest, share, chain.electorate.voters)
        return self.open(newest.round, audits, last_work_by_peer(earlier))

    def open(
        self, round_number: int, audits: Sequence[Audit], last_work: Mapping[PeerId, Blob | None] = NOTHING_KNOWN
    ) -> list[Consequence]:
        """Take the audits of a decided round; return those that are ours, and what early findings lead to."""
        self._round = round_number
        self._cases = {key: case for key, case in self._cases.items() if case.round > round_number - KEPT_ROUNDS}
        ours: list[Consequence] = []
        for audit in audits:
            peer = audit.contribution.sender
            case = self._cases.setdefault((audit.chain, peer), _Case(audit, round_number, last_work.get(peer)))
            if audit.auditors[:1] == (self._peer_id,) and not case.is_repeating:
                case.is_repeating = True
                ours.append(RepeatWork(audit, case.last_work))
        return [*ours, *self._learn_early()]

    def _learn_early(self) -> list[Consequence]:
        due = [key for key, finding in self._early.items() if finding.body.round <= self._round]
        found = [finding for key in due if self._is_known(finding := self._early.pop(key))]
        return [consequence for finding in found for consequence in self._learn(finding)]

    @property
    def round(self) -> int:
        """Return the newest decided round."""
        return self._round

    @property
    def our_audits(self) -> frozenset[AuditKey]:
        """Return the audits that we may still have to repeat."""
        since = self._round - HELD_ROUNDS
        ours = ((key, case) for key, case in self._cases.items() if self._peer_id in case.audit.auditors)
        return frozenset(key for key, case in ours if case.round > since or (case.findings and not case.is_decided))

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
        case.findings[finding.auditor] = finding
        return [*self._confirm(case), *self._decide(case)]

    def _confirm(self, case: _Case) -> list[Consequence]:
        if case.is_repeating or self._peer_id not in case.audit.auditors or not case.count("different"):
            return []
        case.is_repeating = True
        return [RepeatWork(case.audit, case.last_work, is_disputed=True)]

    def _decide(self, case: _Case) -> list[Consequence]:
        if case.is_decided:
            return []
        peer, accusers = case.audit.contribution.sender, case.count("different")
        if accusers >= MAJORITY:
            case.is_decided = True
            return [PeerLied(peer, case.round, self._proof(case))]
        if accusers and case.count("equal") >= MAJORITY:
            case.is_decided = True
            return [PeerStruck(accuser, "audit: false finding") for accuser in self._accusers(case)]
        return []

    def _proof(self, case: _Case) -> tuple[Signed, ...]:
        return tuple(case.findings[accuser].signed for accuser in self._accusers(case))

    def _accusers(self, case: _Case) -> list[PeerId]:
        return sorted(peer for peer, finding in case.findings.items() if finding.body.verdict == "different")


def last_work_by_peer(commits: Sequence[Commit]) -> dict[PeerId, Blob | None]:
    """Return the work record of the last contribution of each peer in these commits."""
    return {entry.sender: entry.body.work for commit in commits for entry in commit.contributions}

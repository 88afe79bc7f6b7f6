"""Many rounds of audits with liars: real trackers and conduct, without the work itself.

Everybody contributes and has a vote. The liars answer for one another. If they are `lazy` they do other work than they
say. They accuse honest peers "always", that is whenever the draw lets one of them, or only "together": where two of
them are on the first panel.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol import murmur_pb2 as wire
from protocol.audit_tracker import PANELS, AuditTracker, Consequence, PeerCleared, PeerStruck, RepeatWork
from protocol.audits import FINDING_KIND, Audit, AuditDraw, AuditKey, Finding, SignedFinding, Verdict, draw_audits
from protocol.blobs.blob import Blob
from protocol.conduct import Conduct, PeerConvicted
from protocol.consensus.chain import genesis_head
from protocol.consensus.messages.contributions import Commit
from protocol.identity import Identity, PeerId
from tests.node.small_run import RUN_ID, contribution_of, stated

Accusations = Literal["always", "together", "never"]
HEAD = genesis_head(RUN_ID)


@dataclass
class Judge:
    """An honest peer."""

    peer: PeerId
    tracker: AuditTracker
    conduct: Conduct
    repeated: int = 0


@dataclass
class Court:
    """A swarm of `count` peers of whom the first `liars` lie; `found`: the round in which each key was excluded."""

    count: int
    liars: int
    share: float = 0.1
    accuse: Accusations = "always"
    lazy: bool = True
    seed: int = 0
    found: dict[PeerId, int] = field(default_factory=dict)
    aside: set[PeerId] = field(default_factory=set)  # honest peers that were set aside at least once
    round: int = 0

    def __post_init__(self) -> None:
        keys = (Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big")) for number in range(1, self.count + 1))
        self._chance = random.Random(self.seed)
        self._identities = [Identity(key) for key in keys]
        self.peers = [identity.peer_id for identity in self._identities]
        self.lying = set(self.peers[: self.liars])
        self.judges = {
            peer: Judge(peer, AuditTracker(peer), Conduct(peer)) for peer in self.peers if peer not in self.lying
        }
        blobs = [Blob.of(peer.encode()) for peer in self.peers]
        self._entries = [
            stated(identity, contribution_of(HEAD, [blob]))
            for identity, blob in zip(self._identities, blobs, strict=True)
        ]
        self._audits: dict[AuditKey, tuple[Audit, int]] = {}
        self._sent: set[tuple[bytes, PeerId, PeerId]] = set()
        self._posted = deque[SignedFinding]()

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self._open()

    @property
    def excluded_honest(self) -> set[PeerId]:
        return self.found.keys() - self.lying

    def _open(self) -> None:
        entries = [entry for entry in self._entries if entry.sender not in self.found]
        commit = Commit(self.round, 0, HEAD.digest, tuple(sorted(entries, key=lambda entry: entry.sender)), ())
        seed = self._chance.randbytes(32)
        audits = draw_audits(commit, seed, AuditDraw(seed), self.share, self.peers)
        self._audits |= {audit.key: (audit, self.round) for audit in audits}
        for judge in self.judges.values():
            self._follow(judge, judge.tracker.open(self.round, audits))
        self._accuse(audits)
        self._deliver()
        self.round += 1

    def _accuse(self, audits: Sequence[Audit]) -> None:
        least = {"always": 1, "together": 2, "never": self.count}[self.accuse]
        for audit in audits:
            accusers = self.lying & set(audit.auditors[: PANELS[0]]) - self.found.keys()
            if audit.contribution.sender not in self.lying and len(accusers) >= least:
                for liar in sorted(accusers):
                    self._post(audit, liar, "different")

    def _deliver(self) -> None:
        while self._posted:
            finding = self._posted.popleft()
            self._answer(finding)
            for judge in self.judges.values():
                self._follow(judge, judge.tracker.learn(finding))

    def _answer(self, finding: SignedFinding) -> None:
        """Let all liars answer what concerns them."""
        audit, _ = self._audits[finding.body.chain, finding.body.audited]
        for liar in sorted(self.lying - self.found.keys() - {audit.contribution.sender}):
            if audit.contribution.sender in self.lying:
                self._post(audit, liar, "equal")
            elif finding.body.verdict == "different":
                self._post(audit, liar, "different")

    def _follow(self, judge: Judge, consequences: Sequence[Consequence]) -> None:
        for consequence in consequences:
            match consequence:
                case RepeatWork(audit):
                    self._repeat(judge, audit)
                case PeerConvicted():
                    judge.conduct.convict(consequence)
                    self.found.setdefault(consequence.peer, self.round)
                case PeerStruck(peer):
                    judge.conduct.strike(peer, self.round)
                    self.aside.update({peer} - self.lying)
                case PeerCleared(peer):
                    judge.conduct.clear(peer)

    def _repeat(self, judge: Judge, audit: Audit) -> None:
        if judge.conduct.is_excluded(audit.contribution.sender):
            return
        judge.repeated += 1
        is_false = self.lazy and audit.contribution.sender in self.lying
        verdict: Verdict = "different" if is_false else "equal"
        self._follow(judge, judge.tracker.note_verdict(audit, verdict))
        if judge.tracker.is_published(audit, verdict):
            self._post(audit, judge.peer, verdict)

    def _post(self, audit: Audit, auditor: PeerId, verdict: Verdict) -> None:
        entry = audit.contribution
        if (key := (audit.chain, entry.sender, auditor)) not in self._sent:
            self._sent.add(key)
            body = Finding(self._audits[audit.key][1], audit.chain, entry.sender, entry.digest, verdict)
            signed = wire.Signed(kind=FINDING_KIND, peer=auditor)
            self._posted.append(SignedFinding(signed, body, auditor))

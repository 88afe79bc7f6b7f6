"""A decided round of a few peers, for tests of audits."""

from protocol.audits import Audit, AuditDraw, Finding, SignedFinding, Verdict, draw_audits, sign_finding
from protocol.blobs.blob import Blob
from protocol.consensus.chain import ChainHead, genesis_head
from protocol.consensus.messages.contributions import Commit
from protocol.identity import Identity
from tests.node.small_run import PEERS, RUN_ID, commit_of

BY_ID = {identity.peer_id: identity for identity in PEERS}


def commit_after(head: ChainHead, peers: int = 6) -> Commit:
    blobs = {number: Blob.of(f"{head.round} {number}".encode()) for number in range(peers)}
    return commit_of(head, blobs).body


def audits_of(share: float = 1.0, peers: int = 6, votes: bool = True) -> tuple[Audit, ...]:
    commit = commit_after(genesis_head(RUN_ID), peers)
    return draw_audits(commit, b"c" * 32, AuditDraw(b"s" * 32), share, commit.by_sender if votes else ())


def finding_of(audit: Audit, auditor: int | str, verdict: Verdict) -> SignedFinding:
    """`auditor`: a place in the ranking, or a peer id."""
    peer = audit.auditors[auditor] if isinstance(auditor, int) else auditor
    entry = audit.contribution
    body = Finding(entry.body.round, audit.chain, entry.sender, entry.digest, verdict)
    return sign_finding(BY_ID[peer], RUN_ID, body)


def identity_of(peer: str) -> Identity:
    return BY_ID[peer]

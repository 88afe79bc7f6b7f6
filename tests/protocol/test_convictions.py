"""Convicted peers are excluded, those with a strike are not waited for, and a peer does neither to itself."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from node.daemon.audits.auditor import Auditor
from protocol.audits import AuditTracker, PeerStruck
from protocol.conduct import Conduct
from tests.node.small_run import PEERS

ME, LIAR = PEERS[0].peer_id, PEERS[1].peer_id


def test_convicted_peer_is_excluded() -> None:
    conduct = Conduct(ME)
    assert LIAR not in conduct.excluded
    conduct.convict(LIAR)
    conduct.convict(ME)
    assert conduct.excluded == {LIAR}


def test_peer_that_fails_under_audits_is_not_waited_for() -> None:
    conduct, others = Conduct(ME), [peer.peer_id for peer in PEERS[:4]]
    tracker = AuditTracker(ME)
    tracker.open(0, [])
    auditor: Any = SimpleNamespace(_conduct=conduct, _tracker=tracker, refusals=Counter())
    Auditor._follow(auditor, [PeerStruck(LIAR, "audit: not served"), PeerStruck(ME, "audit: not served")])
    assert conduct.serving.struck(1, others) == {LIAR: "audit: not served"} and not conduct.excluded
    assert auditor.refusals == {"audit: not served": 2}

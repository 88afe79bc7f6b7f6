"""Convicted peers are excluded, and those with a strike count again once they are cleared."""

from protocol.conduct import Conduct
from tests.node.small_run import PEERS

ME, LIAR = PEERS[0].peer_id, PEERS[1].peer_id


def test_convicted_peer_is_excluded() -> None:
    conduct = Conduct(ME)
    assert LIAR not in conduct.excluded
    conduct.convict(LIAR)
    conduct.convict(ME)
    assert conduct.excluded == {LIAR}


def test_peer_that_is_cleared_is_waited_for_again() -> None:
    conduct, others = Conduct(ME), [peer.peer_id for peer in PEERS[:4]]
    conduct.strike(LIAR, 0, "audit: doubted")
    assert conduct.serving.struck(1, others) == {LIAR: "audit: doubted"} and not conduct.excluded
    conduct.clear(LIAR)
    assert conduct.serving.struck(1, others) == {}

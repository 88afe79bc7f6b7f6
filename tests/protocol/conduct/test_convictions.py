"""Peers that a majority of auditors convicted are excluded, and a peer never excludes itself."""

from protocol.conduct.conduct import Conduct
from tests.node.small_run import PEERS

ME, LIAR = PEERS[0].peer_id, PEERS[1].peer_id


def test_convicted_peer_is_excluded() -> None:
    conduct = Conduct(ME)
    assert LIAR not in conduct.excluded
    conduct.convict(LIAR)
    conduct.convict(ME)
    assert conduct.excluded == {LIAR}

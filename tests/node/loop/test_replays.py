"""Statements of rounds that are neither open nor remembered are refused by name."""

from node.loop.events import MessagesReceived
from protocol.blobs.blob import Blob
from protocol.consensus.events import Rejected
from tests.node.loop.loop_under_test import OTHER, of_kind
from tests.node.loop.test_round_loop_liars import founded, peer_on
from tests.node.small_run import commit_of


def test_statement_of_a_round_long_ago_is_refused_by_name() -> None:
    """The last commit was applied long ago, or by an earlier process. Control: one of the open round is not refused."""
    chain = founded(3)
    peer = peer_on(chain)
    old = commit_of(founded(1).head, {3: Blob.of(b"again")}).body.contributions[0]
    new = commit_of(chain.head, {3: Blob.of(b"now")}).body.contributions[0]
    refused = of_kind(Rejected, peer.post(MessagesReceived(OTHER, (old,))))
    assert [(found.peer, found.reason) for found in refused] == [(old.sender, "wrong round")]
    refused = of_kind(Rejected, peer.post(MessagesReceived(OTHER, (new,))))
    assert "wrong round" not in [found.reason for found in refused]

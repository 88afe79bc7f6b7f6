"""A peer comes back to a head of a chain that it had left: what it signed in the round after it binds it."""

from collections.abc import Container

import pytest

from node.loop import round_session
from node.loop.contributions import StoredContribution
from node.loop.options import RoundOptions
from node.loop.round_session import RoundSession
from protocol.blobs.blob import Blob
from protocol.consensus.chain import Chain
from protocol.consensus.events import MembershipChanged, Send, VoteRecord
from protocol.consensus.pacing import Pacing
from protocol.signing import sign
from tests.node.loop.loop_under_test import FRIEND, ME, SETTINGS, chain_of
from tests.node.loop.test_contributions import make_contribution
from tests.node.small_run import PEERS, RUN_ID, TERMS

PRESENT = MembershipChanged(frozenset({ME, FRIEND}))


class Returning:
    """A session that opens rounds at heads of two chains."""

    def __init__(self) -> None:
        options, pacing = RoundOptions(ME, lambda number: SETTINGS, TERMS), Pacing(1.0, lambda number: 10, 1)
        self.session = RoundSession(options, lambda kind, body: sign(PEERS[1], kind, RUN_ID, body), pacing, None)
        self.now = 0.0

    def take_part(
        self, chain: Chain, contribution: StoredContribution, stored: Container[Blob] | None = None
    ) -> set[bytes]:
        """Open the round after a head for some seconds; return our contributions in it, as they were sent."""
        self.session.open(chain, b"state", PRESENT, PRESENT.peers, (), self.now)
        self.session.submit(contribution, chain, self.now, stored)
        sent = set[bytes]()
        for _ in range(20):
            self.now += 0.5
            self.session.tick()
            for action in self.session.advance(self.now):
                if isinstance(action, Send) and action.signed.kind == "contribution":
                    sent.add(action.signed.SerializeToString())
                if isinstance(action, VoteRecord):
                    self.session.vote_persisted()
        self.session.close()
        return sent


FIRST, SECOND = make_contribution(1, 0), make_contribution(1, 1)


def contribute_again(stored: Container[Blob] | None) -> tuple[set[bytes], set[bytes]]:
    """Return what we contributed before and after our absence from a head at which another peer leads."""
    peer, chain, other = Returning(), chain_of(1)[0], chain_of(2)[0]
    before = peer.take_part(chain, FIRST)
    assert before and peer.take_part(other, SECOND).isdisjoint(before)
    return before, peer.take_part(chain, SECOND, stored)


def test_peer_that_comes_back_to_a_head_repeats_what_it_contributed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with the memory of one head only, it signs another contribution, which is a proof of guilt."""
    before, after = contribute_again(FIRST.parts)
    assert before == after
    assert contribute_again(())[1] == set(), "it cannot serve the blobs any more"
    monkeypatch.setattr(round_session, "MAX_STATEMENTS", 1)
    before, after = contribute_again(None)
    assert after and before.isdisjoint(after)


def reopened_view() -> int:
    """Return the view in which we come back to a head after which we have led a view."""
    peer, chain, other = Returning(), chain_of(1, peer=1)[0], chain_of(2, peer=1)[0]
    peer.take_part(chain, FIRST)
    peer.take_part(other, SECOND)
    peer.session.open(chain, b"state", PRESENT, PRESENT.peers, (), peer.now)
    assert peer.session.machine is not None
    return peer.session.machine.view


def test_peer_that_comes_back_to_a_head_leads_no_view_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with the memory of one head only, it leads the same view twice."""
    assert reopened_view() == 1
    monkeypatch.setattr(round_session, "MAX_STATEMENTS", 1)
    assert reopened_view() == 0

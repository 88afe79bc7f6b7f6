"""A statement that no honest peer signs counts against the key that signed it, at once, and only against that key."""

from typing import Any, cast

import pytest

from node.daemon import inbox as inbox_module
from node.daemon.inbox import Inbox, MessageReceiver
from node.loop.events import LoopEvent
from node.loop.peers.swarm_snapshot import PeerState
from protocol.conduct import Conduct
from protocol.consensus import view_change
from protocol.consensus.chain import genesis_head
from protocol.consensus.events import MisbehaviourSeen
from protocol.consensus.messages.briefs import SeenMessages
from protocol.consensus.messages.kinds import signed_round
from protocol.murmur_pb2 import Contribution, Roster, Signed
from protocol.signing import sign
from tests.node.loop.loop_under_test import FRIEND, ME, OTHER, LoopUnderTest
from tests.node.small_run import PEERS, RUN_ID, TERMS
from tests.protocol.consensus.cluster import Cluster

BASE = genesis_head(RUN_ID).digest
FOURTH = PEERS[4].peer_id


def greedy(author: int = 3, signer: int = 3) -> Signed:
    """Return a contribution of more tokens than allowed, by one key, with the signature of another."""
    body = Contribution(round=0, base=BASE, codec=TERMS.codec, shapes=TERMS.shapes, tokens=2**60, steps=1)
    signed = sign(PEERS[signer], "contribution", RUN_ID, body)
    signed.peer = PEERS[author].peer_id
    return signed


def posted(*envelopes: Signed) -> list[LoopEvent]:
    """Return what a receiver says of envelopes besides their refusal."""
    events: list[LoopEvent] = []
    inbox, status = Inbox(), cast(Any, type("Status", (), {"record_refusal": lambda *faults: None})())
    inbox.attach(events.append)
    MessageReceiver(RUN_ID, TERMS, SeenMessages(), inbox, status).receive(FRIEND, envelopes)
    return [event for event in events if isinstance(event, MisbehaviourSeen)]


def test_the_signer_of_a_refused_statement_is_accused_and_nobody_else() -> None:
    assert posted(greedy()) == [MisbehaviourSeen(OTHER, 0)], "not FRIEND, which delivered it"
    roster = Roster(round=0, view=0, base=BASE, contributions=[greedy(signer=2)])
    signed = sign(PEERS[4], "roster", RUN_ID, roster)
    assert posted(signed) == [MisbehaviourSeen(FOURTH, 0)], "the roster names OTHER, which signed nothing"


def test_a_forged_envelope_says_nothing_about_the_key_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control believes the name on the envelope."""
    assert posted(greedy(signer=2)) == [] and signed_round(greedy(signer=2), RUN_ID) is None
    assert posted(Signed(kind="no such kind", peer=OTHER)) == []
    monkeypatch.setattr(inbox_module, "signed_round", lambda signed, run_id: 0)
    assert posted(greedy(signer=2)) == [MisbehaviourSeen(OTHER, 0)]


def awaited_after_an_accusation(number: int = 0) -> frozenset[str]:
    peer = LoopUnderTest()
    head = peer.chain.head
    peer.others[FOURTH] = PeerState(head, b"mine")
    peer.meet(friend=PeerState(head, b"mine"), other=PeerState(head, b"mine"))
    peer.start()
    machine = peer.loop.session.machine
    assert machine is not None and OTHER in machine._state.voter_set.awaited
    peer.post(MisbehaviourSeen(OTHER, number))
    return machine._state.voter_set.awaited


def test_nobody_waits_for_a_peer_whose_statements_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control takes no strikes. Statements of other rounds are repeats of old ones, or inventions."""
    assert awaited_after_an_accusation() == {ME, FRIEND, FOURTH}
    assert OTHER in awaited_after_an_accusation(number=5)
    monkeypatch.setattr(Conduct, "accuse", lambda self, peer, number: None)
    assert OTHER in awaited_after_an_accusation()


def views_after_an_accusation(exchange: str, drops_roster: bool) -> set[int]:
    table = Cluster(4, exchange, 4 if exchange == "butterfly" else 1)
    leader, *others = table.names
    lost = "roster" if drops_roster else "commit"
    table.drop = lambda sender, receiver, kind: sender == leader and kind == lost
    table.contribute(*table.names)
    assert {table.machines[name].view for name in others} == {0}
    for name in others:
        table.feed_event(name, MisbehaviourSeen(leader, 0))
    assert table.now == 0.0
    return {table.machines[name].view for name in others}


@pytest.mark.parametrize("exchange", ["gather", "butterfly"])
@pytest.mark.parametrize("drops_roster", [True, False])
def test_a_leader_that_signs_a_false_statement_is_given_up_at_once(exchange: str, drops_roster: bool) -> None:
    assert views_after_an_accusation(exchange, drops_roster) == {1}


def test_control_without_the_rule_all_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_change, "has_spoken_falsely", lambda state: False)
    assert views_after_an_accusation("butterfly", drops_roster=False) == {0}

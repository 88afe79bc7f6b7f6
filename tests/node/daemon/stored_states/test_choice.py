"""Which state a host fetches: that of the majority, whatever single records claim."""

from dataclasses import replace

import pytest

from node.daemon.stored_states.choice import ChoiceRules, StateOffer, choose_state
from node.loop.peers.swarm_snapshot import PeerState, SwarmSnapshot
from protocol.consensus.chain import ChainHead

HEAD, NEXT, LAST = (ChainHead(number, bytes([number]) * 32, 100 * number) for number in (7, 8, 9))
GOOD, BAD = b"g" * 32, b"b" * 32
RULES = ChoiceRules("me", has_one_state=True, is_final=lambda head: head.round >= LAST.round)


def trainer(head: ChainHead, state: bytes = GOOD) -> PeerState:
    return PeerState(head, state)


def host(head: ChainHead, state: bytes = GOOD) -> PeerState:
    return PeerState(head, state, is_trainer=False)


def choose(own: ChainHead | None = None, rules: ChoiceRules = RULES, **peers: PeerState) -> StateOffer | None:
    return choose_state(rules, SwarmSnapshot(peers), own)


def test_the_newest_state_that_two_of_three_report_is_chosen() -> None:
    offer = choose(a=trainer(NEXT), b=trainer(NEXT), c=trainer(HEAD))
    assert offer == StateOffer(NEXT, GOOD, ("a", "b"))


def test_one_of_three_peers_cannot_invent_a_head() -> None:
    offer = choose(a=trainer(HEAD), b=trainer(HEAD), liar=trainer(LAST, BAD))
    assert offer is not None and (offer.head, offer.state) == (HEAD, GOOD)
    naive = choose(liar=trainer(LAST, BAD), a=trainer(HEAD))
    assert naive is not None and naive.head == LAST, "with two peers there is no majority to ask"


def test_one_of_three_peers_cannot_pass_off_another_state() -> None:
    offer = choose(a=trainer(HEAD), b=trainer(HEAD), liar=trainer(HEAD, BAD))
    assert offer == StateOffer(HEAD, GOOD, ("a", "b")), "and it is not a source"


def test_without_a_majority_at_a_head_nothing_is_kept() -> None:
    assert choose(a=trainer(HEAD), b=trainer(HEAD, BAD)) is None
    assert choose(a=trainer(NEXT), b=trainer(NEXT, BAD), c=trainer(HEAD), d=trainer(HEAD)) == StateOffer(
        HEAD, GOOD, ("c", "d")
    )


def test_peers_with_states_of_their_own_need_no_majority() -> None:
    offer = choose(rules=replace(RULES, has_one_state=False), a=trainer(HEAD), b=trainer(HEAD, BAD))
    assert offer is not None and offer.head == HEAD


def test_hosts_are_sources_but_no_witnesses_while_a_trainer_is_there() -> None:
    offer = choose(a=trainer(HEAD), one=host(NEXT, BAD), two=host(NEXT, BAD), right=host(HEAD))
    assert offer == StateOffer(HEAD, GOOD, ("a", "right"))
    assert choose(one=host(LAST)) == StateOffer(LAST, GOOD, ("one",)), "a host alone is asked"


@pytest.mark.parametrize("own", [HEAD, NEXT])
def test_only_a_better_state_is_fetched(own: ChainHead) -> None:
    assert choose(own, a=trainer(HEAD), b=trainer(HEAD)) is None


def test_final_state_is_not_replaced_on_the_word_of_one_peer() -> None:
    longer = ChainHead(12, b"z" * 32, 10**6)
    assert choose(LAST, late=trainer(longer, BAD)) is None
    assert choose(HEAD, late=trainer(longer, BAD)) is not None, "another state is"
    assert choose(LAST, a=trainer(longer), b=trainer(longer)) is not None


def test_peers_without_a_state_and_newcomers_are_not_asked() -> None:
    assert choose(a=trainer(ChainHead(0, b"0" * 32, 0)), b=PeerState(HEAD), watcher=PeerState(None)) is None
    assert choose(me=trainer(HEAD)) is None, "our own record is no witness"

from collections import Counter
from dataclasses import replace

import pytest

from protocol.consensus.events import (
    Fetch,
    Finish,
    LocalContribution,
    MembershipChanged,
    MessageReceived,
    Reduce,
)
from protocol.consensus.messages.contributions import NO_ROSTER, Commit, Roster
from protocol.consensus.messages.kinds import Body, ReducedPart, ReducerAssignment, kind_of
from protocol.consensus.messages.signed import SignedMessage
from protocol.identity import PeerId
from tests.protocol.consensus.cluster import BASE, Cluster
from tests.simulation.virtual.network import NAMES, make_contribution, make_signer

BOTH = pytest.mark.parametrize(("exchange", "parts"), [("gather", 1), ("butterfly", 4)])


def all_names(table: Cluster) -> set[tuple[PeerId, ...]]:
    return {tuple(sorted(table.names))}


@BOTH
def test_a_peer_alone_commits_at_once(exchange: str, parts: int) -> None:
    table = Cluster(1, exchange, parts)
    table.contribute(*table.names)
    assert table.included_peers() == all_names(table)
    assert table.machines[table.names[0]].next_deadline(table.now) is None


@BOTH
@pytest.mark.parametrize("peers", [2, 3, 5])
def test_all_commit_the_same_without_waiting(exchange: str, parts: int, peers: int) -> None:
    table = Cluster(peers, exchange, parts)
    table.contribute(*table.names)
    assert table.included_peers() == all_names(table)
    assert len({table.commit(name) for name in table.names}) == 1
    assert len([action for _, action in table.log if isinstance(action, Finish)]) == peers


def test_an_order_to_fetch_says_what_the_blob_holds() -> None:
    table = Cluster(4, "butterfly", 6)
    table.contribute(*table.names)
    commit = next(action.commit.body for _, action in table.log if isinstance(action, Finish))
    contributed = {blob: (part, False) for entry in commit.contributions for part, blob in enumerate(entry.body.parts)}
    summed = {blob: (part, True) for part, blob in enumerate(commit.parts)}
    orders = [action for _, action in table.log if isinstance(action, Fetch)]
    assert {order.is_reduced for order in orders} == {False, True}
    known = contributed | summed
    assert all((order.part_blob.part, order.is_reduced) == known[order.part_blob.blob] for order in orders)


@BOTH
def test_neither_order_nor_repetition_matters(exchange: str, parts: int) -> None:
    table = Cluster(4, exchange, parts)
    table.delivers_backwards, table.copies = True, 3
    table.contribute(*table.names)
    table.elapse(3)
    assert table.included_peers() == all_names(table)


def test_two_peers_sum_each_part_once_in_the_order_of_senders_and_each_peer_checks_another() -> None:
    table = Cluster(3, "butterfly", 6)
    table.contribute(*table.names)
    orders = [(name, action) for name, action in table.log if isinstance(action, Reduce)]
    assert max(Counter((name, order.part) for name, order in orders).values()) == 1
    assert Counter(name for name, _ in orders) == dict.fromkeys(table.names, 2 * 6 // 3 + 1)
    assert min(Counter(order.part for _, order in orders).values()) == 2
    assert all([entry.sender for entry in order.contributions] == sorted(table.names) for _, order in orders)


@BOTH
def test_who_does_not_contribute_is_waited_for_until_grace(exchange: str, parts: int) -> None:
    table = Cluster(3, exchange, parts)
    late = table.names[1]
    table.contribute(table.names[0], table.names[2])
    table.elapse(1.8)
    assert table.included_peers() == set()
    table.elapse(0.4)
    assert table.included_peers() == {tuple(sorted({*table.names} - {late}))}


@BOTH
def test_who_rests_is_not_waited_for_and_votes_all_the_same(exchange: str, parts: int) -> None:
    """The control is the test above: the same silence without the word costs the whole grace."""
    table = Cluster(3, exchange, parts)
    resting = table.names[1]
    for name in table.names:
        table.feed_event(name, MembershipChanged(frozenset(table.names), resting=frozenset({resting})))
    table.contribute(table.names[0], table.names[2])
    assert table.now == 0 and table.included_peers() == {tuple(sorted({*table.names} - {resting}))}
    assert table.commit(resting) is not None, "it has heard, and holds what it takes"


def test_a_majority_counts_those_who_rest() -> None:
    table = Cluster(3, "gather")
    for name in table.names:
        table.feed_event(name, MembershipChanged(frozenset(table.names), resting=frozenset(table.names[1:])))
    table.dead.update(table.names[1:])
    table.contribute(table.names[0])
    table.elapse(10)
    assert table.included_peers() == set()


def test_who_rests_may_contribute_in_time() -> None:
    table = Cluster(3, "gather")
    for name in table.names:
        table.feed_event(name, MembershipChanged(frozenset(table.names), resting=frozenset({table.names[2]})))
    table.contribute(table.names[2])
    assert table.included_peers() == set(), "the others are still to come"
    table.contribute(table.names[0], table.names[1])
    assert table.included_peers() == all_names(table)


@pytest.mark.parametrize(("quorum", "closes_it"), [(0.25, 1), (0.3, 2), (0.5, 2), (0.75, 3), (1.0, 4)])
def test_the_first_contributions_of_a_quorum_close_the_roster(quorum: float, closes_it: int) -> None:
    table = Cluster(4, "gather", quorum=quorum)
    for place, name in enumerate(table.names, start=1):
        assert (table.senders_of("roster") == []) == (place <= closes_it)
        table.contribute(name)
    assert table.included_peers() == {tuple(sorted(table.names[:closes_it]))}
    assert table.now == 0


def test_who_comes_after_the_quorum_is_left_out_and_knows_it() -> None:
    for quorum in (0.5, 1.0):
        table = Cluster(3, "gather", quorum=quorum)
        table.is_slow = lambda peer, digest: True
        table.contribute(*table.names[:2])
        late = table.names[2]
        table.contribute(late)
        table.is_slow = lambda peer, digest: False
        table.deliver_all()
        waited = quorum == 1.0
        assert table.included_peers() == (all_names(table) if waited else {tuple(sorted(table.names[:2]))})
        assert table.rejections_by(late) == (set() if waited else {(late, "late"), (late, "left out")})


def test_fewer_than_half_are_no_round() -> None:
    table = Cluster(5, "gather")
    table.contribute(*table.names[:2])
    table.elapse(30)
    assert table.included_peers() == set() and table.senders_of("roster") == []


def test_a_contribution_after_the_roster_is_late_and_left_out() -> None:
    table = Cluster(3, "gather")
    late = table.names[2]
    table.is_slow = lambda peer, digest: True
    table.contribute(*table.names[:2])
    table.elapse(2.2)
    table.contribute(late)
    assert (late, "late") in table.rejections_by(late)
    table.is_slow = lambda peer, digest: False
    table.elapse(0.2)
    assert table.included_peers() == {tuple(sorted(table.names[:2]))}
    assert (late, "left out") in table.rejections_by(late)
    said = [action for name, action in table.log if name == late]
    assert isinstance(said[-1], Finish), "whoever carries it out has closed the round"


def test_the_first_contribution_of_a_peer_counts() -> None:
    table = Cluster(3, "gather")
    cheat = table.names[2]
    other = replace(make_contribution(cheat, 0, BASE, table.scenario), loss=9.0)
    table.contribute(cheat)
    second = SignedMessage.of(make_signer(cheat)("contribution", other.to_wire()), other)
    table.feed_event(table.names[0], MessageReceived(second))
    assert (cheat, "equivocation") in table.rejections_by(table.names[0])
    table.feed_event(cheat, LocalContribution(other))
    assert (cheat, "equivocation") in table.rejections_by(cheat)


def test_what_does_not_belong_here_is_refused() -> None:
    table = Cluster(2, "gather")
    me, peer = table.names
    stranger = NAMES[9]
    offer = make_contribution(peer, 0, BASE, table.scenario)
    for sender, body in ((peer, replace(offer, base=bytes(32))), (peer, replace(offer, round=1)), (stranger, offer)):
        table.feed_event(
            me, MessageReceived(SignedMessage.of(make_signer(sender)("contribution", body.to_wire()), body))
        )
    assert table.rejections_by(me) == {(peer, "wrong round"), (stranger, "not a member")}
    sums = Commit(
        0, 0, BASE, (SignedMessage.of(make_signer(peer)("contribution", offer.to_wire()), offer),), offer.parts
    )
    table.feed_event(me, MessageReceived(SignedMessage.of(make_signer(peer)("commit", sums.to_wire()), sums)))
    assert len(table.rejections_by(me)) == 2 and table.included_peers() == set()


def _message_received(sender: PeerId, body: Body) -> MessageReceived:
    return MessageReceived(SignedMessage.of(make_signer(sender)(kind_of(body), body.to_wire()), body))


def test_statements_of_another_number_of_parts_are_foreign() -> None:
    table = Cluster(2, "butterfly", 2)
    leader, member = table.names
    offer = make_contribution(leader, 0, BASE, table.scenario)
    for count in (1, 3):
        contribution = _message_received(leader, replace(offer, parts=(offer.parts * 2)[:count]))
        entries, sums = (contribution.message,), (offer.parts * 2)[:count]
        roster = _message_received(leader, Roster(0, 0, BASE, entries))
        inclusion = _message_received(leader, ReducerAssignment(0, 0, NO_ROSTER, 0, (leader,), (leader,) * count))
        commits = (
            _message_received(leader, Commit(0, 0, BASE, entries, offer.parts)),
            _message_received(leader, Commit(0, 0, BASE, (), sums)),
        )
        for event in (
            contribution,
            roster,
            inclusion,
            *commits,
            _message_received(leader, ReducedPart(0, 0, NO_ROSTER, 0, 2, sums[0], BASE)),
        ):
            table.log.clear()
            table.feed_event(member, event)
            assert table.rejections_by(member) == {(leader, "wrong round")}


def test_only_the_leader_opens_a_roster() -> None:
    table = Cluster(3, "gather")
    leader, impostor, member = table.names
    offer = make_contribution(impostor, 0, BASE, table.scenario)
    contribution = SignedMessage.of(make_signer(impostor)("contribution", offer.to_wire()), offer)
    roster = Roster(0, 0, BASE, (contribution,))
    table.feed_event(
        member, MessageReceived(SignedMessage.of(make_signer(impostor)(kind_of(roster), roster.to_wire()), roster))
    )
    assert (impostor, "not the leader") in table.rejections_by(member)
    assert table.machines[member].leader == leader


@BOTH
def test_a_silent_leader_is_followed_by_the_next(exchange: str, parts: int) -> None:
    table = Cluster(3, exchange, parts)
    leader = table.names[0]
    table.kill(leader, noticed=False)
    table.contribute(*table.names[1:])
    table.elapse(1)
    assert table.included_peers() == set()
    table.elapse(9)  # the grace of the silent, the patience with the leader, perhaps with the second one
    table.kill(leader)
    table.elapse(5)
    assert table.included_peers() == {tuple(sorted(table.names[1:]))}


@BOTH
def test_a_leader_that_left_is_skipped_at_once(exchange: str, parts: int) -> None:
    table = Cluster(4, exchange, parts)
    leader = table.names[0]
    table.drop = lambda sender, receiver, kind: sender == leader and kind in ("inclusion", "commit")
    table.contribute(*table.names)
    assert table.included_peers() == set()
    table.kill(leader)
    assert len(table.included_peers()) == 1
    assert all((leader, "leader left") in table.rejections_by(name) for name in table.names[1:])
    assert {table.machines[name].view for name in table.names[1:]} == {1}


def test_a_minority_waits_until_votes_are_forgotten() -> None:
    table = Cluster(3, "gather")
    alone = max(table.names)  # not the lowest, which decides between two halves
    table.dead.update({*table.names} - {alone})
    table.set_live(alone)
    table.contribute(alone)
    table.elapse(table.scenario.vote_memory - 1)
    assert table.included_peers() == set()
    table.elapse(3)
    assert table.included_peers() == {(alone,)}


def test_who_says_good_bye_has_no_vote() -> None:
    table = Cluster(3, "gather")
    alone = max(table.names)
    others = frozenset(table.names) - {alone}
    table.dead.update(others)
    table.feed_event(alone, MembershipChanged(frozenset({alone}), departed=others))
    table.contribute(alone)
    assert table.included_peers() == {(alone,)}


def test_time_in_which_we_were_suspended_forgets_no_vote() -> None:
    table = Cluster(3, "gather")
    alone = max(table.names)
    table.dead.update({*table.names} - {alone})
    table.set_live(alone)
    table.contribute(alone)
    table.now += 10 * table.scenario.vote_memory
    table.elapse(2)
    assert table.included_peers() == set()


def test_votes_pass_on_to_the_next_round() -> None:
    table = Cluster(3, "gather")
    table.contribute(*table.names)
    alone = max(table.names)
    machine = table.new_machine(alone, table.machines[alone].last_seen)
    machine.handle(MembershipChanged(frozenset({alone})), table.now)
    machine.handle(LocalContribution(make_contribution(alone, 0, BASE, table.scenario)), table.now)
    assert machine.commit is None
    fresh = table.new_machine(alone)
    fresh.handle(MembershipChanged(frozenset({alone})), table.now)
    fresh.handle(LocalContribution(make_contribution(alone, 0, BASE, table.scenario)), table.now)
    assert fresh.commit is not None


@pytest.mark.parametrize("reducers", [1, 2])
def test_a_reducer_that_dies_takes_its_contribution_along_unless_another_has_it(reducers: int) -> None:
    table = Cluster(4, "butterfly", 4, reducers=reducers)
    victim = table.names[3]
    table.drop = lambda sender, receiver, kind: victim in (sender, receiver) and kind in ("inclusion", "part")
    table.contribute(*table.names)
    assert table.included_peers() == set()
    table.kill(victim)
    table.elapse(3)
    assert table.included_peers() == {tuple(sorted(table.names[: 2 + reducers]))}
    expected = {(victim, "reducer left")} | ({(victim, "not fetched")} if reducers == 1 else set())
    assert expected <= table.rejections_by(table.names[0])


def test_the_parts_of_a_silent_reducer_go_to_others() -> None:
    table = Cluster(4, "butterfly", 4)
    victim = table.names[3]
    table.drop = lambda sender, receiver, kind: sender == victim and kind == "part"
    table.contribute(*table.names)
    table.elapse(5)
    assert table.included_peers() == all_names(table)
    assert (victim, "reducer silent") in table.rejections_by(table.names[0])


def test_what_only_its_owner_holds_is_left_out_in_the_end() -> None:
    table = Cluster(3, "gather")
    slow = table.names[2]
    digest = table.blobs_of_contribution(slow)[0].digest
    table.is_slow = lambda peer, wanted: wanted == digest
    table.contribute(*table.names)
    table.elapse(table.scenario.settings().grace - 0.2)
    assert table.included_peers() == set()
    table.elapse(1)
    assert table.included_peers() == {tuple(sorted(table.names[:2]))}
    assert (slow, "left out") in table.rejections_by(slow)


def test_a_slow_receiver_is_waited_for_no_longer_than_grace() -> None:
    table = Cluster(3, "gather")
    slow = table.names[2]
    table.is_slow = lambda peer, wanted: peer == slow
    table.contribute(*table.names)
    assert table.included_peers() == set()
    table.elapse(2.4)
    assert table.included_peers() == all_names(table)


def test_the_decision_finishes_whoever_missed_everything() -> None:
    table = Cluster(3, "gather")
    deaf = table.names[2]
    table.contribute(deaf)
    table.drop = lambda sender, receiver, kind: receiver == deaf
    table.contribute(*table.names[:2])
    table.elapse(3)
    assert table.commit(table.names[0]) and table.commit(deaf) is None
    for signed in reversed(table.machines[table.names[0]].signed_decision):
        table.feed_event(deaf, MessageReceived(table.network.open(signed)))
    assert table.commit(deaf) == table.commit(table.names[0])


def test_a_commit_without_acknowledgements_decides_nothing() -> None:
    table = Cluster(3, "gather")
    deaf = table.names[2]
    table.contribute(deaf)
    table.drop = lambda sender, receiver, kind: receiver == deaf
    table.contribute(*table.names[:2])
    table.elapse(3)
    table.feed_event(deaf, MessageReceived(table.network.open(table.machines[table.names[0]].signed_decision[0])))
    assert table.commit(deaf) is None


def test_a_newcomer_is_told_contributions_and_roster() -> None:
    table = Cluster(3, "gather")
    leader, member, newcomer = table.names
    table.dead.add(newcomer)
    table.set_live(leader, member)
    table.is_slow = lambda peer, digest: True
    table.contribute(leader, member)
    table.dead.clear()
    table.machines[newcomer] = table.new_machine(newcomer, dict.fromkeys(table.names, table.now))
    table.set_live(*table.names)
    assert table.machines[newcomer].leader == leader
    table.is_slow = lambda peer, digest: False
    table.elapse(3)
    assert table.commit(newcomer) == table.commit(leader)

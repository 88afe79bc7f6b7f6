from dataclasses import replace

import pytest

from protocol.identity import PeerId
from protocol.rounds.events import Exchange, Fetch, Finish, Live, Offered, Received, Reduce
from protocol.rounds.kinds import Body, kind_of
from protocol.rounds.reports import Inclusion, Part
from protocol.rounds.statements import NO_ROSTER, Commit, Roster, Statement
from tests.protocol.rounds.round_table import BASE, Table
from tests.simulation.network import NAMES, offer_of, signer_of

BOTH = pytest.mark.parametrize(("exchange", "parts"), [("gather", 1), ("butterfly", 4)])


def everybody(table: Table) -> set[tuple[PeerId, ...]]:
    return {tuple(sorted(table.names))}


@BOTH
def test_a_peer_alone_commits_at_once(exchange: Exchange, parts: int) -> None:
    table = Table(1, exchange, parts)
    table.offer(*table.names)
    assert table.included() == everybody(table)
    assert table.machines[table.names[0]].next_deadline(table.now) is None


@BOTH
@pytest.mark.parametrize("peers", [2, 3, 5])
def test_all_commit_the_same_without_waiting(exchange: Exchange, parts: int, peers: int) -> None:
    table = Table(peers, exchange, parts)
    table.offer(*table.names)
    assert table.included() == everybody(table)
    assert len({table.commit(name) for name in table.names}) == 1
    assert len([action for _, action in table.log if isinstance(action, Finish)]) == peers


def test_an_order_to_fetch_says_what_the_blob_holds() -> None:
    table = Table(4, "butterfly", 6)
    table.offer(*table.names)
    commit = next(action.commit.body for _, action in table.log if isinstance(action, Finish))
    contributed = {blob: (part, False) for entry in commit.contributions for part, blob in enumerate(entry.body.parts)}
    summed = {blob: (part, True) for part, blob in enumerate(commit.parts)}
    orders = [action for _, action in table.log if isinstance(action, Fetch)]
    assert {order.is_sum for order in orders} == {False, True}
    known = contributed | summed
    assert all((order.portion.part, order.is_sum) == known[order.portion.blob] for order in orders)


@BOTH
def test_neither_order_nor_repetition_matters(exchange: Exchange, parts: int) -> None:
    table = Table(4, exchange, parts)
    table.backwards, table.copies = True, 3
    table.offer(*table.names)
    table.elapse(3)
    assert table.included() == everybody(table)


def test_a_reduction_is_ordered_by_sender_and_asked_for_once() -> None:
    table = Table(3, "butterfly", 6)
    table.offer(*table.names)
    orders = [action for _, action in table.log if isinstance(action, Reduce)]
    assert sorted(order.part for order in orders) == list(range(6))
    assert all([entry.sender for entry in order.contributions] == sorted(table.names) for order in orders)


@BOTH
def test_who_does_not_contribute_is_waited_for_until_grace(exchange: Exchange, parts: int) -> None:
    table = Table(3, exchange, parts)
    late = table.names[1]
    table.offer(table.names[0], table.names[2])
    table.elapse(1.8)
    assert table.included() == set()
    table.elapse(0.4)
    assert table.included() == {tuple(sorted({*table.names} - {late}))}


@BOTH
def test_who_rests_is_not_waited_for_and_votes_all_the_same(exchange: Exchange, parts: int) -> None:
    """The control is the test above: the same silence without the word costs the whole grace."""
    table = Table(3, exchange, parts)
    resting = table.names[1]
    for name in table.names:
        table.feed(name, Live(frozenset(table.names), resting=frozenset({resting})))
    table.offer(table.names[0], table.names[2])
    assert table.now == 0 and table.included() == {tuple(sorted({*table.names} - {resting}))}
    assert table.commit(resting) is not None, "it has heard, and holds what it takes"


def test_a_majority_counts_those_who_rest() -> None:
    table = Table(3, "gather")
    for name in table.names:
        table.feed(name, Live(frozenset(table.names), resting=frozenset(table.names[1:])))
    table.dead.update(table.names[1:])
    table.offer(table.names[0])
    table.elapse(10)
    assert table.included() == set()


def test_who_rests_may_contribute_in_time() -> None:
    table = Table(3, "gather")
    for name in table.names:
        table.feed(name, Live(frozenset(table.names), resting=frozenset({table.names[2]})))
    table.offer(table.names[2])
    assert table.included() == set(), "the others are still to come"
    table.offer(table.names[0], table.names[1])
    assert table.included() == everybody(table)


@pytest.mark.parametrize(("quorum", "closes_it"), [(0.25, 1), (0.3, 2), (0.5, 2), (0.75, 3), (1.0, 4)])
def test_the_first_contributions_of_a_quorum_close_the_roster(quorum: float, closes_it: int) -> None:
    table = Table(4, "gather", quorum=quorum)
    for place, name in enumerate(table.names, start=1):
        assert (table.sent("roster") == []) == (place <= closes_it)
        table.offer(name)
    assert table.included() == {tuple(sorted(table.names[:closes_it]))}
    assert table.now == 0


def test_who_comes_after_the_quorum_is_left_out_and_knows_it() -> None:
    for quorum in (0.5, 1.0):
        table = Table(3, "gather", quorum=quorum)
        table.is_slow = lambda peer, digest: True
        table.offer(*table.names[:2])
        late = table.names[2]
        table.offer(late)
        table.is_slow = lambda peer, digest: False
        table.settle()
        waited = quorum == 1.0
        assert table.included() == (everybody(table) if waited else {tuple(sorted(table.names[:2]))})
        assert table.skips(late) == (set() if waited else {(late, "late"), (late, "left out")})


def test_fewer_than_half_are_no_round() -> None:
    table = Table(5, "gather")
    table.offer(*table.names[:2])
    table.elapse(30)
    assert table.included() == set() and table.sent("roster") == []


def test_a_contribution_after_the_roster_is_late_and_left_out() -> None:
    table = Table(3, "gather")
    late = table.names[2]
    table.is_slow = lambda peer, digest: True
    table.offer(*table.names[:2])
    table.elapse(2.2)
    table.offer(late)
    assert (late, "late") in table.skips(late)
    table.is_slow = lambda peer, digest: False
    table.elapse(0.2)
    assert table.included() == {tuple(sorted(table.names[:2]))}
    assert (late, "left out") in table.skips(late)
    said = [action for name, action in table.log if name == late]
    assert isinstance(said[-1], Finish), "whoever carries it out has closed the round"


def test_the_first_contribution_of_a_peer_counts() -> None:
    table = Table(3, "gather")
    cheat = table.names[2]
    other = replace(offer_of(cheat, 0, BASE, table.scenario), loss=9.0)
    table.offer(cheat)
    second = Statement.of(signer_of(cheat)("contribution", other.to_wire()), other)
    table.feed(table.names[0], Received(second))
    assert (cheat, "equivocation") in table.skips(table.names[0])
    table.feed(cheat, Offered(other))
    assert (cheat, "equivocation") in table.skips(cheat)


def test_what_does_not_belong_here_is_refused() -> None:
    table = Table(2, "gather")
    me, peer = table.names
    stranger = NAMES[9]
    offer = offer_of(peer, 0, BASE, table.scenario)
    for sender, body in ((peer, replace(offer, base=bytes(32))), (peer, replace(offer, round=1)), (stranger, offer)):
        table.feed(me, Received(Statement.of(signer_of(sender)("contribution", body.to_wire()), body)))
    assert table.skips(me) == {(peer, "foreign"), (stranger, "stranger")}
    sums = Commit(0, 0, BASE, (Statement.of(signer_of(peer)("contribution", offer.to_wire()), offer),), offer.parts)
    table.feed(me, Received(Statement.of(signer_of(peer)("commit", sums.to_wire()), sums)))
    assert len(table.skips(me)) == 2 and table.included() == set()


def _said(sender: PeerId, body: Body) -> Received:
    return Received(Statement.of(signer_of(sender)(kind_of(body), body.to_wire()), body))


def test_statements_of_another_number_of_parts_are_foreign() -> None:
    table = Table(2, "butterfly", 2)
    leader, member = table.names
    offer = offer_of(leader, 0, BASE, table.scenario)
    for count in (1, 3):
        contribution = _said(leader, replace(offer, parts=(offer.parts * 2)[:count]))
        entries, sums = (contribution.statement,), (offer.parts * 2)[:count]
        roster = _said(leader, Roster(0, 0, BASE, entries))
        inclusion = _said(leader, Inclusion(0, 0, NO_ROSTER, 0, (leader,), (leader,) * count))
        commits = _said(leader, Commit(0, 0, BASE, entries, offer.parts)), _said(leader, Commit(0, 0, BASE, (), sums))
        for event in (contribution, roster, inclusion, *commits, _said(leader, Part(0, 0, NO_ROSTER, 0, 2, sums[0]))):
            table.log.clear()
            table.feed(member, event)
            assert table.skips(member) == {(leader, "foreign")}


def test_only_the_leader_opens_a_roster() -> None:
    table = Table(3, "gather")
    leader, impostor, member = table.names
    offer = offer_of(impostor, 0, BASE, table.scenario)
    contribution = Statement.of(signer_of(impostor)("contribution", offer.to_wire()), offer)
    roster = Roster(0, 0, BASE, (contribution,))
    table.feed(member, Received(Statement.of(signer_of(impostor)(kind_of(roster), roster.to_wire()), roster)))
    assert (impostor, "not the leader") in table.skips(member)
    assert table.machines[member].leader == leader


@BOTH
def test_a_silent_leader_is_followed_by_the_next(exchange: Exchange, parts: int) -> None:
    table = Table(3, exchange, parts)
    leader = table.names[0]
    table.kill(leader, noticed=False)
    table.offer(*table.names[1:])
    table.elapse(1)
    assert table.included() == set()
    table.elapse(9)  # the grace of the silent, the patience with the leader, perhaps with the second one
    table.kill(leader)
    table.elapse(5)
    assert table.included() == {tuple(sorted(table.names[1:]))}


@BOTH
def test_a_leader_that_left_is_skipped_at_once(exchange: Exchange, parts: int) -> None:
    table = Table(4, exchange, parts)
    leader = table.names[0]
    table.drop = lambda sender, receiver, kind: sender == leader and kind in ("inclusion", "commit")
    table.offer(*table.names)
    assert table.included() == set()
    table.kill(leader)
    assert len(table.included()) == 1
    assert all((leader, "leader left") in table.skips(name) for name in table.names[1:])
    assert {table.machines[name].view for name in table.names[1:]} == {1}


def test_a_minority_waits_until_votes_are_forgotten() -> None:
    table = Table(3, "gather")
    alone = max(table.names)  # not the lowest, which decides between two halves
    table.dead.update({*table.names} - {alone})
    table.live(alone)
    table.offer(alone)
    table.elapse(table.scenario.vote_memory - 1)
    assert table.included() == set()
    table.elapse(3)
    assert table.included() == {(alone,)}


def test_who_says_good_bye_has_no_vote() -> None:
    table = Table(3, "gather")
    alone = max(table.names)
    others = frozenset(table.names) - {alone}
    table.dead.update(others)
    table.feed(alone, Live(frozenset({alone}), departed=others))
    table.offer(alone)
    assert table.included() == {(alone,)}


def test_time_in_which_we_were_suspended_forgets_no_vote() -> None:
    table = Table(3, "gather")
    alone = max(table.names)
    table.dead.update({*table.names} - {alone})
    table.live(alone)
    table.offer(alone)
    table.now += 10 * table.scenario.vote_memory
    table.elapse(2)
    assert table.included() == set()


def test_votes_pass_on_to_the_next_round() -> None:
    table = Table(3, "gather")
    table.offer(*table.names)
    alone = max(table.names)
    machine = table.machine(alone, table.machines[alone].seen)
    machine.handle(Live(frozenset({alone})), table.now)
    machine.handle(Offered(offer_of(alone, 0, BASE, table.scenario)), table.now)
    assert machine.commit is None
    fresh = table.machine(alone)
    fresh.handle(Live(frozenset({alone})), table.now)
    fresh.handle(Offered(offer_of(alone, 0, BASE, table.scenario)), table.now)
    assert fresh.commit is not None


def test_a_reducer_that_dies_takes_its_contribution_along_for_all() -> None:
    table = Table(4, "butterfly", 4)
    victim = table.names[3]
    table.drop = lambda sender, receiver, kind: victim in (sender, receiver) and kind in ("inclusion", "part")
    table.offer(*table.names)
    assert table.included() == set()
    table.kill(victim)
    table.elapse(3)
    assert table.included() == {tuple(sorted(table.names[:3]))}
    assert {(victim, "reducer left"), (victim, "lost")} <= table.skips(table.names[0])


def test_the_parts_of_a_silent_reducer_go_to_others() -> None:
    table = Table(4, "butterfly", 4)
    victim = table.names[3]
    table.drop = lambda sender, receiver, kind: sender == victim and kind == "part"
    table.offer(*table.names)
    table.elapse(5)
    assert table.included() == everybody(table)
    assert (victim, "reducer silent") in table.skips(table.names[0])


def test_what_only_its_owner_holds_is_left_out_in_the_end() -> None:
    table = Table(3, "gather")
    slow = table.names[2]
    digest = table.blobs(slow)[0].digest
    table.is_slow = lambda peer, wanted: wanted == digest
    table.offer(*table.names)
    table.elapse(table.scenario.settings().grace - 0.2)
    assert table.included() == set()
    table.elapse(1)
    assert table.included() == {tuple(sorted(table.names[:2]))}
    assert (slow, "left out") in table.skips(slow)


def test_a_slow_receiver_is_waited_for_no_longer_than_grace() -> None:
    table = Table(3, "gather")
    slow = table.names[2]
    table.is_slow = lambda peer, wanted: peer == slow
    table.offer(*table.names)
    assert table.included() == set()
    table.elapse(2.4)
    assert table.included() == everybody(table)


def test_the_decision_finishes_whoever_missed_everything() -> None:
    table = Table(3, "gather")
    deaf = table.names[2]
    table.offer(deaf)
    table.drop = lambda sender, receiver, kind: receiver == deaf
    table.offer(*table.names[:2])
    table.elapse(3)
    assert table.commit(table.names[0]) and table.commit(deaf) is None
    for signed in reversed(table.machines[table.names[0]].decision):
        table.feed(deaf, Received(table.network.open(signed)))
    assert table.commit(deaf) == table.commit(table.names[0])


def test_a_commit_without_acknowledgements_decides_nothing() -> None:
    table = Table(3, "gather")
    deaf = table.names[2]
    table.offer(deaf)
    table.drop = lambda sender, receiver, kind: receiver == deaf
    table.offer(*table.names[:2])
    table.elapse(3)
    table.feed(deaf, Received(table.network.open(table.machines[table.names[0]].decision[0])))
    assert table.commit(deaf) is None


def test_a_newcomer_is_told_contributions_and_roster() -> None:
    table = Table(3, "gather")
    leader, member, newcomer = table.names
    table.dead.add(newcomer)
    table.live(leader, member)
    table.is_slow = lambda peer, digest: True
    table.offer(leader, member)
    table.dead.clear()
    table.machines[newcomer] = table.machine(newcomer, dict.fromkeys(table.names, table.now))
    table.live(*table.names)
    assert table.machines[newcomer].leader == leader
    table.is_slow = lambda peer, digest: False
    table.elapse(3)
    assert table.commit(newcomer) == table.commit(leader)

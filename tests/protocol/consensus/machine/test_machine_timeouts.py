"""Nobody is waited for who cannot help: each rule with the time that it saves, and what happens without it."""

import itertools
import math
from collections.abc import Callable

import pytest

from protocol.consensus import machine, view_change
from protocol.consensus.events import MembershipChanged, MessageReceived, RejectReason
from protocol.consensus.leader import Leader
from protocol.consensus.messages.contributions import Roster
from protocol.consensus.messages.kinds import Inventory, kind_of
from protocol.consensus.messages.signed import SignedMessage
from protocol.consensus.quorum import Election
from protocol.consensus.state import RoundState
from protocol.consensus.view import View
from protocol.identity import PeerId
from tests.protocol.consensus.cluster import BASE, Cluster
from tests.simulation.virtual.network import make_contribution, make_signer

BOTH = pytest.mark.parametrize(("exchange", "parts"), [("gather", 1), ("butterfly", 4)])


def seconds_until(table: Cluster, done: Callable[[], bool], most: float = 40.0) -> float:
    begun = table.now
    while not done() and table.now < begun + most:
        table.elapse(0.2)
    return table.now - begun


def _with_a_deaf_leader() -> Cluster:
    """It is heard by all and hears nobody once its roster is out."""
    table = Cluster(3, "gather")
    leader = table.names[0]
    table.drop = lambda sender, receiver, kind: receiver == leader and kind in ("holding", "acknowledgement")
    table.contribute(*table.names)
    return table


def test_a_leader_that_hears_nobody_is_given_up_as_soon_as_a_silent_one() -> None:
    table = _with_a_deaf_leader()
    assert seconds_until(table, lambda: bool(table.included_peers())) < 2 * table.scenario.settings().leader_timeout
    assert (table.names[0], "leader silent") in table.rejections_by(table.names[1])


def test_if_it_gave_signs_of_life_to_those_it_does_not_hear_all_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def to_everybody(state: RoundState, view: View, holding: SignedMessage[Inventory]) -> list[machine.OutgoingMessage]:
        return [(state.others, view.roster), (state.others, holding)]

    monkeypatch.setattr(machine, "_leader_messages", to_everybody)
    monkeypatch.setattr(view_change, "JOIN_TIMEOUTS", math.inf)
    table = _with_a_deaf_leader()
    assert seconds_until(table, lambda: bool(table.included_peers())) > table.scenario.settings().exchange_timeout


def _with_one_survivor(exchange: str, parts: int, place: int) -> tuple[Cluster, list[PeerId]]:
    """Seven of eight die in the middle of a round, and four come back: with the one that stayed a majority, but it is
    in a view that they know nothing of, and which somebody else leads as they see it."""
    table = Cluster(8, exchange, parts)
    names, survivor = table.names, table.names[place]
    table.is_slow = lambda peer, digest: True
    table.contribute(*names)
    table.kill(*(name for name in names if name != survivor))
    table.is_slow = lambda peer, digest: False
    table.elapse(4.0)
    returning = [name for name in table.machines if name not in (survivor, names[0])][:5]
    table.dead -= {*returning}
    for name in returning:
        table.machines[name] = table.new_machine(name, dict.fromkeys(names, table.now))
    table.set_live(survivor, *returning)
    table.contribute(*returning)
    return table, [survivor, *returning]


@BOTH
@pytest.mark.parametrize("place", range(1, 8))
def test_who_comes_back_meets_who_stayed_in_one_view(exchange: str, parts: int, place: int) -> None:
    table, present = _with_one_survivor(exchange, parts, place)
    settings = table.scenario.settings()
    spent = seconds_until(table, lambda: all(table.commit(name) for name in present))
    assert spent <= 4 * settings.leader_timeout < settings.exchange_timeout, f"{spent:.1f} s"


@BOTH
def test_if_a_leader_waited_for_its_exchange_to_end_before_anybody_joins_they_would_miss_each_other(
    exchange: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_change, "JOIN_TIMEOUTS", math.inf)
    monkeypatch.setattr(view_change, "MAX_VIEW_JUMP", 0)
    table, present = _with_one_survivor(exchange, parts, 7)
    spent = seconds_until(table, lambda: all(table.commit(name) for name in present))
    assert spent > 4 * table.scenario.settings().leader_timeout


def test_a_second_leader_of_a_view_takes_over_with_no_poorer_roster() -> None:
    for richer in (False, True):
        table = Cluster(3, "gather")
        second, *others = table.names  # the second one ranks above the first
        first, member = sorted(others, key=lambda name: name != Election(BASE).leader(0, frozenset(others)))
        table.is_slow = lambda peer, digest: True
        known = MembershipChanged(frozenset({first, member}))
        table.dead.add(second)
        for name in (first, member):
            table.feed_event(name, known)
        table.contribute(*((first,) if not richer else ()), member)
        table.elapse(2.4)
        table.dead.clear()
        table.set_live(*table.names)
        senders = table.names[:1] if not richer else [second, member]
        offers = [(name, make_contribution(name, 0, BASE, table.scenario)) for name in sorted(senders)]
        entries = tuple(
            SignedMessage.of(make_signer(name)("contribution", body.to_wire()), body) for name, body in offers
        )
        roster = Roster(0, 0, BASE, entries)
        table.feed_event(
            member, MessageReceived(SignedMessage.of(make_signer(second)(kind_of(roster), roster.to_wire()), roster))
        )
        assert ((second, "smaller roster") in table.rejections_by(member)) == (not richer)
        assert table.machines[member].leader == (second if richer else first)


def test_a_newcomer_that_did_not_contribute_is_not_waited_for() -> None:
    table = Cluster(3, "gather")
    leader, member, newcomer = table.names
    table.dead.add(newcomer)
    table.set_live(leader, member)
    table.is_slow = lambda peer, digest: True
    table.contribute(leader, member)
    table.dead.clear()
    table.set_live(*table.names)
    table.is_slow = lambda peer, digest: peer == newcomer
    table.deliver_all()
    assert table.commit(leader) is not None and table.now == 0


def _with_a_contributor_that_died_unnoticed(exchange: str, parts: int) -> tuple[Cluster, PeerId]:
    table = Cluster(4, exchange, parts)
    victim = table.names[3]
    table.is_slow = lambda peer, digest: digest in {blob.digest for blob in table.blobs_of_contribution(victim)}
    table.contribute(victim)
    table.kill(victim, noticed=False)
    table.contribute(*table.names[:3])
    return table, victim


@BOTH
def test_a_contributor_that_never_joined_counts_as_absent_after_a_grace(exchange: str, parts: int) -> None:
    table, victim = _with_a_contributor_that_died_unnoticed(exchange, parts)
    assert seconds_until(table, lambda: bool(table.included_peers())) < 2 * table.scenario.settings().grace
    assert table.included_peers() == {tuple(sorted({*table.names} - {victim}))}


@BOTH
def test_without_that_rule_the_whole_exchange_is_waited_for(
    exchange: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Leader, "_update_present_peers", lambda self, now: self.joined_peers())
    monkeypatch.setattr(Leader, "_straggler_deadline", lambda self, promised, wanted, now: math.inf)
    table, _ = _with_a_contributor_that_died_unnoticed(exchange, parts)
    assert (
        seconds_until(table, lambda: bool(table.included_peers())) >= table.scenario.settings().exchange_timeout - 0.2
    )


def _with_a_silent_leader_of_two_views() -> tuple[Cluster, PeerId]:
    """Three of eight are left; one of them leads the first two views by its rank, and is dead."""
    table = Cluster(8, "gather")
    election = Election(BASE)
    trios = [frozenset(trio) for trio in itertools.combinations(table.names, 3)]
    trio = next(trio for trio in trios if election.leader(0, trio) == election.leader(1, trio))
    victim = election.leader(0, trio)
    assert victim is not None
    table.dead.update({*table.names} - trio)
    table.set_live(*trio)
    table.dead.add(victim)
    table.contribute(*(trio - {victim}))
    table.elapse(table.scenario.settings().leader_timeout + 0.4)
    return table, victim


def test_who_kept_silent_leads_no_second_view() -> None:
    table, victim = _with_a_silent_leader_of_two_views()
    leaders = {table.machines[name].leader for name in table.names if name not in table.dead}
    assert victim not in leaders and len(leaders) == 1


def test_without_that_rule_it_leads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundState, "candidates", property(lambda self: self.live))
    table, victim = _with_a_silent_leader_of_two_views()
    assert {table.machines[name].leader for name in table.names if name not in table.dead} == {victim}


def _with_a_dead_leader() -> Cluster:
    table = Cluster(3, "gather")
    table.kill(table.names[0], noticed=False)
    table.contribute(*table.names[1:])
    return table


def test_a_dead_leader_is_missed_while_its_contribution_is_still_awaited() -> None:
    table = _with_a_dead_leader()
    assert seconds_until(table, lambda: bool(table.included_peers())) < table.scenario.settings().grace + 0.5


def test_if_it_were_missed_only_afterwards_both_waits_would_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    patient = view_change._missing_roster_fault

    def afterwards(state: RoundState, now: float) -> RejectReason | None:
        state.contributed_at = None
        return patient(state, now)

    monkeypatch.setattr(view_change, "_missing_roster_fault", afterwards)
    settings = (table := _with_a_dead_leader()).scenario.settings()
    assert seconds_until(table, lambda: bool(table.included_peers())) > settings.grace + settings.leader_timeout - 0.3


def test_a_leader_that_still_trains_is_not_missed() -> None:
    table = Cluster(5, "gather")
    table.contribute(table.names[1])
    table.elapse(20)
    assert {table.machines[name].view for name in table.names} == {0}
    table.contribute(table.names[0], *table.names[2:])
    assert table.included_peers() == {tuple(sorted(table.names))}


def _with_a_thin_link(exchange: str, parts: int) -> tuple[Cluster, PeerId]:
    """Everything of one peer's comes to nobody in time; all else has come at once."""
    table = Cluster(4, exchange, parts)
    thin = table.names[3]
    slow = {blob.digest for blob in table.blobs_of_contribution(thin)}
    table.is_slow = lambda peer, digest: digest in slow
    table.contribute(*table.names)
    return table, thin


@BOTH
def test_a_message_that_hardly_comes_holds_the_others_for_a_grace_and_may_come_again(exchange: str, parts: int) -> None:
    table, thin = _with_a_thin_link(exchange, parts)
    assert seconds_until(table, lambda: bool(table.included_peers())) < 2 * table.scenario.settings().grace
    assert table.included_peers() == {tuple(sorted(table.names[:3]))}
    assert (thin, "left out") in table.rejections_by(table.names[0])
    for name in table.names:
        assert table.machines[name].left_out_blobs == {blob.digest for blob in table.blobs_of_contribution(thin)}


@BOTH
def test_without_that_rule_it_holds_them_for_the_whole_exchange(
    exchange: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Leader, "_straggler_deadline", lambda self, promised, wanted, now: math.inf)
    table, _ = _with_a_thin_link(exchange, parts)
    assert (
        seconds_until(table, lambda: bool(table.included_peers())) >= table.scenario.settings().exchange_timeout - 0.2
    )


@BOTH
def test_where_all_messages_take_long_none_is_left_out(exchange: str, parts: int) -> None:
    """They come one after the other, over more time than the grace."""
    table = Cluster(4, exchange, parts)
    order = [blob.digest for name in table.names for blob in table.blobs_of_contribution(name)]
    pause = 2.5 * table.scenario.settings().grace / len(order)
    table.is_slow = lambda peer, digest: digest in order and table.now < pause * order.index(digest)
    table.contribute(*table.names)
    seconds_until(table, lambda: bool(table.included_peers()))
    assert table.included_peers() == {tuple(sorted(table.names))}

"""One peer that leads views to nothing holds nobody for long, though it may choose which views it leads."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from protocol.consensus import view_change
from protocol.consensus.events import MessageReceived
from protocol.consensus.messages.contributions import NO_ROSTER, Roster
from protocol.consensus.messages.kinds import Body, Inventory, kind_of
from protocol.consensus.messages.signed import SignedMessage
from protocol.consensus.quorum import Election
from protocol.consensus.state import MAX_VIEW, RoundState
from protocol.consensus.view_change import MAX_VIEW_JUMP
from protocol.identity import PeerId
from tests.protocol.consensus.cluster import BASE, Cluster
from tests.simulation.virtual.network import make_contribution, make_signer

SECONDS = 150.0
REPEAT = 0.5  # of what nobody has answered
SpoilerMessages = Callable[[SignedMessage[Roster]], Iterator[Body]]


def signed_message(peer: PeerId, body: Any) -> SignedMessage[Any]:
    return SignedMessage.of(make_signer(peer)(kind_of(body), body.to_wire()), body)


class Spoiler:
    """Leads one view after the other of those that its rank gives it: once the others have given it up in the last one,
    or even before (`hastes`)."""

    def __init__(self, table: Cluster, says: SpoilerMessages, away: int, hastes: bool) -> None:
        self._table = table
        self._says = says
        self._away = away
        self._hastes = hastes
        self.name = max(table.names)  # not the lowest, which decides between two halves
        self._others = [name for name in table.names if name != self.name]
        self._roster = self._lead(0)
        self._has_begun = False
        table.dead.add(self.name)

    def act(self) -> None:
        newest = max(self._table.machines[name].view for name in self._others)
        if self._hastes or not self._has_begun or newest > self._roster.body.view:
            self._has_begun = True
            self._roster = self._lead(newest + 1 + self._away)
            self._tell(self._roster)
        for body in self._says(self._roster):
            self._tell(signed_message(self.name, body))
        self._table.deliver_all()

    def _lead(self, first: int) -> SignedMessage[Roster]:
        election, names = Election(BASE), frozenset(self._table.names)
        mine = next(view for view in count(first) if election.leader(view, names) == self.name)
        offers = ((name, make_contribution(name, 0, BASE, self._table.scenario)) for name in sorted(names))
        return signed_message(
            self.name, Roster(0, mine, BASE, tuple(signed_message(name, offer) for name, offer in offers))
        )

    def _tell(self, statement: SignedMessage[Any]) -> None:
        for name in self._others:
            self._table.feed_event(name, MessageReceived(statement))


def nothing(roster: SignedMessage[Roster]) -> Iterator[Body]:
    yield from ()


def signs_of_life(roster: SignedMessage[Roster]) -> Iterator[Body]:
    yield Inventory(0, roster.body.view, roster.digest, ())


def that_it_moved_on(roster: SignedMessage[Roster]) -> Iterator[Body]:
    yield Inventory(0, roster.body.view + 1, NO_ROSTER, ())


def _with_a_spoiler(says: SpoilerMessages, away: int, hastes: bool) -> Cluster:
    """The rosters of the others are on their way for a while: it comes between them and every leader of theirs."""
    table = Cluster(5, "gather")
    spoiler, machines = Spoiler(table, says, away, hastes), table.machines
    table.drop = lambda sender, receiver, kind: (
        kind == "roster" and table.now < machines[sender]._state.view_since + REPEAT
    )
    table.contribute(*(name for name in table.names if name != spoiler.name))
    while not table.included_peers() and table.now < SECONDS:
        table.elapse(0.2)
        spoiler.act()
    return table


ALL = pytest.mark.parametrize("says", [nothing, signs_of_life, that_it_moved_on])
HASTES = pytest.mark.parametrize("hastes", [False, True])
AWAY = pytest.mark.parametrize("away", [0, 1000])


@ALL
@HASTES
@AWAY
def test_it_holds_them_for_a_while(says: SpoilerMessages, hastes: bool, away: int) -> None:
    assert len(_with_a_spoiler(says, away, hastes).included_peers()) == 1


@ALL
@HASTES
def test_that_does_not_hang_on_how_its_rank_falls(
    says: SpoilerMessages, hastes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every view is near enough: it is not heard because it has failed."""
    monkeypatch.setattr(view_change, "max_reachable_view", lambda state: MAX_VIEW)
    table = _with_a_spoiler(says, 0, hastes)
    assert len(table.included_peers()) == 1 and table.now < SECONDS / 4


@pytest.mark.slow
@ALL
@HASTES
@AWAY
def test_without_these_rules_it_holds_them_for_ever(
    says: SpoilerMessages, hastes: bool, away: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def may_lead(state: RoundState, peer: PeerId, view: int) -> bool:
        return peer in {state.election.leader(view, state.live), state.election.leader(view, state.candidates)}

    monkeypatch.setattr(view_change, "may_lead", may_lead)
    monkeypatch.setattr(view_change, "max_reachable_view", lambda state: MAX_VIEW)
    assert _with_a_spoiler(says, away, hastes).included_peers() == set()


@pytest.mark.parametrize("beyond", [0, 1])
def test_nobody_takes_us_far_alone(beyond: int) -> None:
    table, view = Cluster(5, "gather"), MAX_VIEW_JUMP + beyond
    leader = Election(BASE).leader(view, frozenset(table.names))
    me, giver, *_ = (name for name in table.names if name != leader)
    assert leader is not None
    entry = signed_message(giver, make_contribution(giver, 0, BASE, table.scenario))
    table.feed_event(me, MessageReceived(signed_message(leader, Roster(0, view, BASE, (entry,)))))
    assert table.machines[me].view == (0 if beyond else view)
    assert ((leader, "view too far") in table.rejections_by(me)) == bool(beyond)

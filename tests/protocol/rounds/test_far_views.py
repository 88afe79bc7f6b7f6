"""One peer that leads views to nothing holds nobody for long, though it may choose which views it leads."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from protocol.identity import PeerId
from protocol.rounds.election import Election
from protocol.rounds.events import Received
from protocol.rounds.kinds import Body, kind_of
from protocol.rounds.reports import Holding
from protocol.rounds.state import FARTHEST, MAX_VIEW, RoundState
from protocol.rounds.statements import NO_ROSTER, Roster, Statement
from tests.protocol.rounds.round_table import BASE, Table
from tests.simulation.network import RUN_ID, offer_of, signer_of

SECONDS = 150.0
REPEAT = 0.5  # of what nobody has answered
Says = Callable[[Statement[Roster]], Iterator[Body]]


def said(peer: PeerId, body: Any) -> Statement[Any]:
    return Statement.of(signer_of(peer)(kind_of(body), body.to_wire()), body)


class Spoiler:
    """Leads one view after the other of those that its rank gives it: once the others have given it up in the last one,
    or even before (`hastes`)."""

    def __init__(self, table: Table, says: Says, away: int, hastes: bool) -> None:
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
            self._tell(said(self.name, body))
        self._table.settle()

    def _lead(self, first: int) -> Statement[Roster]:
        election, names = Election(RUN_ID, 0), frozenset(self._table.names)
        mine = next(view for view in count(first) if election.leader(view, names) == self.name)
        offers = ((name, offer_of(name, 0, BASE, self._table.scenario)) for name in sorted(names))
        return said(self.name, Roster(0, mine, BASE, tuple(said(name, offer) for name, offer in offers)))

    def _tell(self, statement: Statement[Any]) -> None:
        for name in self._others:
            self._table.feed(name, Received(statement))


def nothing(roster: Statement[Roster]) -> Iterator[Body]:
    yield from ()


def signs_of_life(roster: Statement[Roster]) -> Iterator[Body]:
    yield Holding(0, roster.body.view, roster.digest, ())


def that_it_moved_on(roster: Statement[Roster]) -> Iterator[Body]:
    yield Holding(0, roster.body.view + 1, NO_ROSTER, ())


def _with_a_spoiler(says: Says, away: int, hastes: bool) -> Table:
    """The rosters of the others are on their way for a while: it comes between them and every leader of theirs."""
    table = Table(5, "gather")
    spoiler, machines = Spoiler(table, says, away, hastes), table.machines
    table.drop = lambda sender, receiver, kind: (
        kind == "roster" and table.now < machines[sender]._state.view_since + REPEAT
    )
    table.offer(*(name for name in table.names if name != spoiler.name))
    while not table.included() and table.now < SECONDS:
        table.elapse(0.2)
        spoiler.act()
    return table


ALL = pytest.mark.parametrize("says", [nothing, signs_of_life, that_it_moved_on])
HASTES = pytest.mark.parametrize("hastes", [False, True])
AWAY = pytest.mark.parametrize("away", [0, 1000])


@ALL
@HASTES
@AWAY
def test_it_holds_them_for_a_while(says: Says, hastes: bool, away: int) -> None:
    assert len(_with_a_spoiler(says, away, hastes).included()) == 1


@ALL
@HASTES
def test_that_does_not_hang_on_how_its_rank_falls(says: Says, hastes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every view is near enough: it is not heard because it has failed."""
    monkeypatch.setattr(RoundState, "farthest_view", MAX_VIEW)
    table = _with_a_spoiler(says, 0, hastes)
    assert len(table.included()) == 1 and table.now < SECONDS / 4


@ALL
@HASTES
@AWAY
def test_without_these_rules_it_holds_them_for_ever(
    says: Says, hastes: bool, away: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def may_lead(self: RoundState, peer: PeerId, view: int) -> bool:
        return peer in {self.election.leader(view, self.live), self.election.leader(view, self._candidates)}

    monkeypatch.setattr(RoundState, "may_lead", may_lead)
    monkeypatch.setattr(RoundState, "farthest_view", MAX_VIEW)
    assert _with_a_spoiler(says, away, hastes).included() == set()


@pytest.mark.parametrize("beyond", [0, 1])
def test_nobody_takes_us_far_alone(beyond: int) -> None:
    table, view = Table(5, "gather"), FARTHEST + beyond
    leader = Election(RUN_ID, 0).leader(view, frozenset(table.names))
    me, giver, *_ = (name for name in table.names if name != leader)
    assert leader is not None
    entry = said(giver, offer_of(giver, 0, BASE, table.scenario))
    table.feed(me, Received(said(leader, Roster(0, view, BASE, (entry,)))))
    assert table.machines[me].view == (0 if beyond else view)
    assert ((leader, "far view") in table.skips(me)) == bool(beyond)

"""What binds a peer beyond the life of its process. That it needs to, the simulation shows (see `bugs`)."""

from collections.abc import Sequence
from dataclasses import replace

from protocol.identity import PeerId
from protocol.rounds.events import Action, Live, Send, Vow
from protocol.rounds.reports import Holding
from protocol.rounds.round import Round
from tests.protocol.rounds.round_table import BASE, Table
from tests.simulation.network import signer_of


def decided() -> Table:
    table = Table(3, "gather")
    table.offer(*table.names)
    assert len(table.included()) == 1
    return table


def said_by(table: Table, name: PeerId) -> list[Action]:
    return [action for who, action in table.log if who == name]


def vows_of(actions: Sequence[Action]) -> list[Vow]:
    return [action for action in actions if isinstance(action, Vow)]


def test_a_vow_stands_before_all_that_it_covers() -> None:
    table = decided()
    for name in table.names:
        actions = said_by(table, name)
        joined, locked = vows_of(actions)
        assert (joined.view, joined.lock) == (0, None)
        assert locked.lock is not None and locked.lock.body == table.commit(name)
        assert joined.members == locked.members == frozenset(table.names)
        kinds = [action.signed.kind if isinstance(action, Send) else type(action).__name__ for action in actions]
        promised = "roster" if name == table.names[0] else "holding"
        assert kinds.index("Vow") < kinds.index(promised)
        told = "decision" if name == table.names[0] else "acknowledgement"
        assert len(kinds) - 1 - kinds[::-1].index("Vow") < kinds.index(told)


def restarted(table: Table, vow: Vow | None, base: bytes = BASE) -> tuple[Round, Holding]:
    """A new machine of the last to lead, and the first holding that it repeats."""
    name = table.names[-1]
    seen = dict.fromkeys(table.names, 0.0)
    machine = Round(table.scenario.settings(), name, 0, base, signer_of(name), 0.0, seen, vow)
    machine.handle(Live(frozenset(table.names)), 0.0)
    return machine, machine._state.holding()


def test_a_new_process_begins_in_the_view_after_its_vow_and_tells_its_lock() -> None:
    table = decided()
    vow = vows_of(said_by(table, table.names[-1]))[-1]
    assert vow.lock is not None
    machine, holding = restarted(table, replace(vow, view=3))
    assert (machine.view, holding.view, holding.lock) == (4, 4, vow.lock.digest)
    machine, holding = restarted(table, None)
    assert (machine.view, holding.view, holding.lock) == (0, 0, b""), "the negative control"


def test_a_vow_of_another_chain_or_round_binds_to_nothing() -> None:
    table = decided()
    vow = vows_of(said_by(table, table.names[-1]))[-1]
    for other in (replace(vow, base=bytes(32)), replace(vow, round=1)):
        machine, holding = restarted(table, other)
        assert (machine.view, holding.lock) == (0, b"")


def test_the_others_follow_at_once_whoever_they_need_for_a_majority() -> None:
    """Two of five are dead and one has come back: without it the two others decide nothing in their view."""
    table = Table(5, "gather")
    back = table.names[2]
    table.drop = lambda sender, receiver, kind: back in (sender, receiver)
    table.offer(*table.names[:2])
    table.kill(*table.names[3:])
    table.elapse(0.6)
    assert not table.included()
    vow = Vow(0, BASE, 0, None, frozenset(table.names))
    seen = dict.fromkeys(table.names, table.now)
    settings, signer = table.scenario.settings(), signer_of(back)
    table.machines[back] = Round(settings, back, 0, BASE, signer, table.now, seen, vow)
    table.drop = lambda sender, receiver, kind: False
    table.live(*table.names[:3])
    table.elapse(0.8)
    assert {table.machines[name].view for name in table.names[:3]} == {1}

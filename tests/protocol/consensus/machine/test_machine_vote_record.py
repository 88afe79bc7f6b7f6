"""What binds a peer beyond the life of its process. That it needs to, the simulation shows (see `bugs`)."""

from collections.abc import Sequence
from dataclasses import replace

from protocol.consensus.events import Action, MembershipChanged, Send, VoteRecord
from protocol.consensus.machine import RoundMachine
from protocol.consensus.messages.kinds import Inventory
from protocol.consensus.settings import RoundStart
from protocol.identity import PeerId
from tests.protocol.consensus.cluster import BASE, TRUSTED, Cluster
from tests.simulation.virtual.network import make_signer


def decided() -> Cluster:
    table = Cluster(3, "gather")
    table.contribute(*table.names)
    assert len(table.included_peers()) == 1
    return table


def actions_of(table: Cluster, name: PeerId) -> list[Action]:
    return [action for who, action in table.log if who == name]


def vote_records_of(actions: Sequence[Action]) -> list[VoteRecord]:
    return [action for action in actions if isinstance(action, VoteRecord)]


def test_a_vow_stands_before_all_that_it_covers() -> None:
    table = decided()
    for name in table.names:
        actions = actions_of(table, name)
        joined, locked = vote_records_of(actions)
        assert (joined.view, joined.lock) == (0, None)
        assert locked.lock is not None and locked.lock.body == table.commit(name)
        assert joined.members == locked.members == frozenset(table.names)
        kinds = [action.signed.kind if isinstance(action, Send) else type(action).__name__ for action in actions]
        promised = "roster" if name == table.names[0] else "holding"
        assert kinds.index("VoteRecord") < kinds.index(promised)
        told = "decision" if name == table.names[0] else "acknowledgement"
        assert len(kinds) - 1 - kinds[::-1].index("VoteRecord") < kinds.index(told)


def restarted(table: Cluster, vow: VoteRecord | None, base: bytes = BASE) -> tuple[RoundMachine, Inventory]:
    """A new machine of the last to lead, and the first holding that it repeats."""
    name = table.names[-1]
    seen = dict.fromkeys(table.names, 0.0)
    machine = RoundMachine(table.scenario.settings(), name, RoundStart(0, base, seen, vow), make_signer(name), 0.0)
    machine.handle(MembershipChanged(frozenset(table.names)), 0.0)
    return machine, machine._state.build_inventory()


def test_a_new_process_begins_in_the_view_after_its_vow_and_tells_its_lock() -> None:
    table = decided()
    vow = vote_records_of(actions_of(table, table.names[-1]))[-1]
    assert vow.lock is not None
    machine, holding = restarted(table, replace(vow, view=3))
    assert (machine.view, holding.view, holding.lock) == (4, 4, vow.lock.digest)
    machine, holding = restarted(table, None)
    assert (machine.view, holding.view, holding.lock) == (0, 0, b""), "the negative control"


def test_a_vow_of_another_chain_or_round_binds_to_nothing() -> None:
    table = decided()
    vow = vote_records_of(actions_of(table, table.names[-1]))[-1]
    for other in (replace(vow, base=bytes(32)), replace(vow, round=1)):
        machine, holding = restarted(table, other)
        assert (machine.view, holding.lock) == (0, b"")


def test_the_others_follow_at_once_whoever_they_need_for_a_majority() -> None:
    """Two of five are dead and one has come back: without it the two others decide nothing in their view."""
    table = Cluster(5, "gather", electorate=TRUSTED)
    back = table.names[2]
    table.drop = lambda sender, receiver, kind: back in (sender, receiver)
    table.contribute(*table.names[:2])
    table.kill(*table.names[3:])
    table.elapse(0.6)
    assert not table.included_peers()
    vow = VoteRecord(0, BASE, 0, None, frozenset(table.names))
    seen = dict.fromkeys(table.names, table.now)
    settings, signer = table.scenario.settings(), make_signer(back)
    table.machines[back] = RoundMachine(
        settings, back, RoundStart(0, BASE, seen, vow, electorate=TRUSTED), signer, table.now
    )
    table.drop = lambda sender, receiver, kind: False
    table.set_live(*table.names[:3])
    table.elapse(0.8)
    assert {table.machines[name].view for name in table.names[:3]} == {1}

"""The notary, the vault, the ledger, the batched machine and the curves, each alone."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from node.channel import Message
from node.daemon.replica import OuterState
from node.simulation.comparison import Series
from node.simulation.ledger import Ledger
from node.simulation.measure import Examiner, Point, Recorder, outcome
from node.simulation.notary import Notary
from node.simulation.plot import mean_curve
from node.simulation.swarm import peer_name
from node.simulation.vault import KEPT_ROUNDS, Applied, Vault
from optim.exchange import Sender
from optim.layout import Layout
from optim.program import Program
from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.errors import MissingFileError
from protocol.identity import Identity
from protocol.records import sign
from protocol.rounds.events import Action, Event
from protocol.rounds.reports import Part
from protocol.rounds.round import Round
from protocol.rounds.statements import Commit, Contribution, Roster, Statement, Terms
from tests.node.simulation.virtual_swarm import corpus, finished, method, setting

RUN = "ab" * 32
SHAPES = b"s" * 32
PEERS = sorted(peer_name(slot) for slot in range(3))
TERMS = Terms("none", SHAPES, 1, 1000, 10_000)
NUMEL = 100


def contribution(payload: bytes = b"payload", base: bytes = b"b" * 32) -> Contribution:
    return Contribution(0, base, "none", SHAPES, 10, 1, 2.0, (Blob.of(payload),))


def stated(notary: Notary, peer: str, body: Contribution) -> Statement[Contribution]:
    return notary.open(notary.signer(peer)("contribution", body.to_wire()))


def test_the_notary_opens_what_it_signed_and_each_statement_once() -> None:
    notary = Notary(TERMS)
    statement = stated(notary, PEERS[0], contribution())
    assert statement.body == contribution() and statement.sender == PEERS[0]
    copy = wire.Signed()
    copy.ParseFromString(statement.signed.SerializeToString())
    assert notary.open(copy) is statement


def test_statements_have_the_size_of_really_signed_ones() -> None:
    identity = Identity.create()
    real = sign(identity, "contribution", RUN, contribution().to_wire())
    ours = Notary(TERMS).signer(identity.peer_id)("contribution", contribution().to_wire())
    assert ours.ByteSize() == real.ByteSize()


def test_lists_of_statements_are_opened_with_their_members() -> None:
    notary = Notary(TERMS)
    entries = tuple(stated(notary, peer, contribution()) for peer in PEERS)
    roster = Roster(0, 0, b"b" * 32, entries)
    commit = Commit(0, 0, b"b" * 32, entries, (Blob.of(b"sum"),))
    for kind, body in (("roster", roster), ("commit", commit)):
        assert notary.open(notary.signer(PEERS[1])(kind, body.to_wire())).body == body


def test_the_notary_forgets_old_rounds() -> None:
    notary = Notary(TERMS)
    signed = notary.signer(PEERS[0])("part", Part(4, 0, b"r" * 32, 0, 0, Blob.of(b"sum")).to_wire())
    statement = notary.open(signed)
    notary.forget_before(4)
    assert notary.open(signed) is statement
    notary.forget_before(5)
    assert notary.open(signed) is not statement


PROGRAM = Program(
    method("averaging", 1, {"codec": {"kind": "none"}, "topology": {"kind": "gather"}}), Layout(((NUMEL,),)), 1
)


def vault(replicas: int = 1) -> Vault:
    return Vault(PROGRAM, lambda step: 1.0, OuterState.initial(torch.zeros(NUMEL), PROGRAM.method), replicas)


def commit_of(stock: Vault, scale: float) -> Commit:
    parts = Sender(PROGRAM).message(0, torch.linspace(-1, 1, NUMEL) * scale, torch.zeros(NUMEL))
    payload = bytes(parts[0])
    stock.put(payload)
    return Commit(0, 0, b"b" * 32, (stated(Notary(TERMS), PEERS[0], contribution(payload)),), ())


def applied(stock: Vault, before: Applied, commit: Commit) -> Applied:
    return stock.apply(before, commit, commit.contributions)


def test_equal_inputs_give_equal_states_and_others_do_not() -> None:
    first, second = vault(), vault()
    after = applied(first, first.initial, commit_of(first, 1.0))
    assert applied(first, first.initial, commit_of(first, 1.0)) is after  # worked out once
    assert applied(second, second.initial, commit_of(second, 1.0))[1] == after[1]  # and anew the same
    assert applied(first, first.initial, commit_of(first, 2.0))[1] != after[1]
    assert applied(first, after, commit_of(first, 1.0))[1] != after[1]
    torch.testing.assert_close(after[0].anchor, -torch.linspace(-1, 1, NUMEL))


def test_a_payload_that_does_not_decode_is_found() -> None:
    stock = vault()
    good = commit_of(stock, 1.0).blobs[0]
    assert stock.is_well_formed(good, 0, 0)
    assert not stock.is_well_formed(stock.put(b"nonsense"), 0, 0)


def test_the_vault_keeps_the_last_rounds_only() -> None:
    stock = vault()
    old = stock.put(b"old")
    stock.enter(KEPT_ROUNDS)
    recent = stock.put(b"recent")
    assert stock.read(old) == b"old"
    stock.enter(KEPT_ROUNDS + 1)
    assert stock.read(recent) == b"recent"
    with pytest.raises(MissingFileError, match="not kept any more"):
        stock.read(old)
    assert stock.payloads([recent, old]) == [] and not stock.is_well_formed(old, KEPT_ROUNDS + 1, 0)


def message(number: int) -> Message:
    return Message(round=number, sizes=(7,), tokens=10, steps=1, loss=1.0)


def test_the_ledger_counts_an_inclusion_once_however_many_learn_of_it() -> None:
    ledger, parts = Ledger(), (Blob.of(b"payload"),)
    ledger.enter(PEERS[0], message(0), parts)
    entry = stated(Notary(TERMS), PEERS[0], contribution())
    for view in (0, 1):
        ledger.decide(Commit(0, view, b"b" * 32, (entry,), ()))
    assert ledger.entries[PEERS[0], 0].times_included == 1
    assert ledger.message_bits == 8 * 7
    again = stated(Notary(TERMS), PEERS[0], contribution(base=b"c" * 32))
    ledger.decide(Commit(0, 0, b"c" * 32, (again,), ()))
    assert ledger.entries[PEERS[0], 0].times_included == 2
    ledger.bury(PEERS[0])
    assert ledger.entries[PEERS[0], 0].end == "died"


def test_the_ledger_finds_what_must_not_be() -> None:
    ledger, notary = Ledger(), Notary(TERMS)
    for peer in PEERS[:2]:
        ledger.enter(peer, message(0), (Blob.of(b"payload"),))
    with pytest.raises(AssertionError, match="two messages"):
        ledger.enter(PEERS[0], message(0), ())
    first, second = (stated(notary, peer, contribution()) for peer in PEERS[:2])
    ledger.decide(Commit(0, 0, b"b" * 32, (first,), ()))
    with pytest.raises(AssertionError, match="two commits"):
        ledger.decide(Commit(0, 0, b"b" * 32, (first, second), ()))
    invented = stated(notary, PEERS[0], contribution(b"another", b"c" * 32))
    with pytest.raises(AssertionError, match="not on its way"):
        ledger.decide(Commit(0, 0, b"c" * 32, (invented,), ()))


@pytest.mark.parametrize("recipe", ["diloco", "sparseloco"])
def test_events_taken_together_decide_the_same_as_one_by_one(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[bytes, bytes]:
        swarm, _ = finished(setting(5, 6), method(recipe, 2))
        return swarm.alive[0].chain.digest, swarm.alive[0].applied[1].digest

    together = run()
    at_once = Round.handle_all

    def one_by_one(self: Round, events: Iterable[Event], now: float) -> list[Action]:
        return [action for event in events for action in at_once(self, [event], now)]

    monkeypatch.setattr(Round, "handle_all", one_by_one)
    assert run() == together


def test_a_curve_has_its_points_and_always_the_end() -> None:
    recorder = Recorder(Examiner(setting(2, 4), corpus()), 4)
    shares = [0.1, 0.2, 0.3, 0.5, 0.55, 0.9, 0.95, 1.0]
    assert [share for share in shares if recorder.is_due(share)] == [0.3, 0.5, 0.9, 1.0]
    only_the_end = Recorder(Examiner(setting(2, 4), corpus()), 1)
    assert [share for share in shares if only_the_end.is_due(share)] == [1.0]


def test_a_drawn_curve_is_the_mean_over_the_seeds() -> None:
    swarm, recorder = finished(setting(2, 2), method("averaging", 1))
    one = outcome(swarm, recorder, 1.0)
    first = replace(one, curve=(Point(1, 1.0, 10.0, 4.0), Point(2, 2.0, 20.0, 3.0)))
    second = replace(one, curve=(Point(1, 3.0, 30.0, 2.0),))
    assert mean_curve(Series("x", (first, second))) == [Point(1, 2.0, 20.0, 3.0)]

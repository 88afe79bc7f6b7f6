"""The notary, the vault, the ledger, the batched machine and the curves, each alone."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from node.daemon.outer_state import OuterState
from node.ipc.channel import ContributionHeader
from node.simulation.accounting import Accounting
from node.simulation.comparison import RecipeResults
from node.simulation.fake_signer import FakeSigner
from node.simulation.measurement import CurvePoint, CurveRecorder, Evaluator, compute_result
from node.simulation.plot import mean_curve
from node.simulation.shared_compute import KEPT_ROUNDS, AppliedState, SharedCompute
from node.simulation.swarm import simulated_peer_id
from optim.exchange import ContributionEncoder
from optim.layout import Layout
from optim.round_plan import RoundPlanner
from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.consensus.events import Action, Event
from protocol.consensus.machine import RoundMachine
from protocol.consensus.message_kinds import ReducedPart
from protocol.consensus.messages import Commit, Contribution, ContributionLimits, Roster, SignedMessage
from protocol.errors import MissingFileError
from protocol.identity import Identity
from protocol.signing import sign
from tests.node.simulation.virtual_swarm import make_config, make_corpus, make_method, run_to_target

RUN = "ab" * 32
SHAPES = b"s" * 32
PEERS = sorted(simulated_peer_id(slot) for slot in range(3))
TERMS = ContributionLimits("none", SHAPES, 1, 1000, 10_000)
NUMEL = 100


def contribution(payload: bytes = b"payload", base: bytes = b"b" * 32) -> Contribution:
    return Contribution(0, base, "none", SHAPES, 10, 1, 2.0, (Blob.of(payload),))


def stated(notary: FakeSigner, peer: str, body: Contribution) -> SignedMessage[Contribution]:
    return notary.open(notary.signer_for(peer)("contribution", body.to_wire()))


def test_the_notary_opens_what_it_signed_and_each_statement_once() -> None:
    notary = FakeSigner(TERMS)
    statement = stated(notary, PEERS[0], contribution())
    assert statement.body == contribution() and statement.sender == PEERS[0]
    copy = wire.Signed()
    copy.ParseFromString(statement.signed.SerializeToString())
    assert notary.open(copy) is statement


def test_statements_have_the_size_of_really_signed_ones() -> None:
    identity = Identity.create()
    real = sign(identity, "contribution", RUN, contribution().to_wire())
    ours = FakeSigner(TERMS).signer_for(identity.peer_id)("contribution", contribution().to_wire())
    assert ours.ByteSize() == real.ByteSize()


def test_lists_of_statements_are_opened_with_their_members() -> None:
    notary = FakeSigner(TERMS)
    entries = tuple(stated(notary, peer, contribution()) for peer in PEERS)
    roster = Roster(0, 0, b"b" * 32, entries)
    commit = Commit(0, 0, b"b" * 32, entries, (Blob.of(b"sum"),))
    for kind, body in (("roster", roster), ("commit", commit)):
        assert notary.open(notary.signer_for(PEERS[1])(kind, body.to_wire())).body == body


def test_the_notary_forgets_old_rounds() -> None:
    notary = FakeSigner(TERMS)
    signed = notary.signer_for(PEERS[0])("part", ReducedPart(4, 0, b"r" * 32, 0, 0, Blob.of(b"sum")).to_wire())
    statement = notary.open(signed)
    notary.forget_before(4)
    assert notary.open(signed) is statement
    notary.forget_before(5)
    assert notary.open(signed) is not statement


PROGRAM = RoundPlanner(
    make_method("averaging", 1, {"codec": {"kind": "none"}, "topology": {"kind": "gather"}}), Layout(((NUMEL,),)), 1
)


def vault(replicas: int = 1) -> SharedCompute:
    return SharedCompute(PROGRAM, lambda step: 1.0, OuterState.initial(torch.zeros(NUMEL), PROGRAM.method), replicas)


def commit_of(stock: SharedCompute, scale: float) -> Commit:
    parts = ContributionEncoder(PROGRAM).encode(0, torch.linspace(-1, 1, NUMEL) * scale, torch.zeros(NUMEL))
    payload = bytes(parts[0])
    stock.put(payload)
    return Commit(0, 0, b"b" * 32, (stated(FakeSigner(TERMS), PEERS[0], contribution(payload)),), ())


def applied(stock: SharedCompute, before: AppliedState, commit: Commit) -> AppliedState:
    return stock.apply_commit(before, commit, commit.contributions)


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
    stock.begin_round(KEPT_ROUNDS)
    recent = stock.put(b"recent")
    assert stock.read(old) == b"old"
    stock.begin_round(KEPT_ROUNDS + 1)
    assert stock.read(recent) == b"recent"
    with pytest.raises(MissingFileError, match="not kept any more"):
        stock.read(old)
    assert stock.read_payloads([recent, old]) == [] and not stock.is_well_formed(old, KEPT_ROUNDS + 1, 0)


def message(number: int) -> ContributionHeader:
    return ContributionHeader(round=number, sizes=(7,), tokens=10, steps=1, loss=1.0)


def test_the_ledger_counts_an_inclusion_once_however_many_learn_of_it() -> None:
    ledger, parts = Accounting(), (Blob.of(b"payload"),)
    ledger.record_contribution(PEERS[0], message(0), parts)
    entry = stated(FakeSigner(TERMS), PEERS[0], contribution())
    for view in (0, 1):
        ledger.record_commit(Commit(0, view, b"b" * 32, (entry,), ()))
    assert ledger.contributions[PEERS[0], 0].times_included == 1
    assert ledger.contribution_bits == 8 * 7
    again = stated(FakeSigner(TERMS), PEERS[0], contribution(base=b"c" * 32))
    ledger.record_commit(Commit(0, 0, b"c" * 32, (again,), ()))
    assert ledger.contributions[PEERS[0], 0].times_included == 2
    ledger.record_death(PEERS[0])
    assert ledger.contributions[PEERS[0], 0].end == "died"


def test_the_ledger_finds_what_must_not_be() -> None:
    ledger, notary = Accounting(), FakeSigner(TERMS)
    for peer in PEERS[:2]:
        ledger.record_contribution(peer, message(0), (Blob.of(b"payload"),))
    with pytest.raises(AssertionError, match="two messages"):
        ledger.record_contribution(PEERS[0], message(0), ())
    first, second = (stated(notary, peer, contribution()) for peer in PEERS[:2])
    ledger.record_commit(Commit(0, 0, b"b" * 32, (first,), ()))
    with pytest.raises(AssertionError, match="two commits"):
        ledger.record_commit(Commit(0, 0, b"b" * 32, (first, second), ()))
    invented = stated(notary, PEERS[0], contribution(b"another", b"c" * 32))
    with pytest.raises(AssertionError, match="not on its way"):
        ledger.record_commit(Commit(0, 0, b"c" * 32, (invented,), ()))


@pytest.mark.parametrize("recipe", ["diloco", "sparseloco"])
def test_events_taken_together_decide_the_same_as_one_by_one(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[bytes, bytes]:
        swarm, _ = run_to_target(make_config(5, 6), make_method(recipe, 2))
        return swarm.live_peers[0].chain.digest, swarm.live_peers[0].applied_state[1].digest

    together = run()
    at_once = RoundMachine.handle_all

    def one_by_one(self: RoundMachine, events: Iterable[Event], now: float) -> list[Action]:
        return [action for event in events for action in at_once(self, [event], now)]

    monkeypatch.setattr(RoundMachine, "handle_all", one_by_one)
    assert run() == together


def test_a_curve_has_its_points_and_always_the_end() -> None:
    recorder = CurveRecorder(Evaluator(make_config(2, 4), make_corpus()), 4)
    shares = [0.1, 0.2, 0.3, 0.5, 0.55, 0.9, 0.95, 1.0]
    assert [share for share in shares if recorder.is_due(share)] == [0.3, 0.5, 0.9, 1.0]
    only_the_end = CurveRecorder(Evaluator(make_config(2, 4), make_corpus()), 1)
    assert [share for share in shares if only_the_end.is_due(share)] == [1.0]


def test_a_drawn_curve_is_the_mean_over_the_seeds() -> None:
    swarm, recorder = run_to_target(make_config(2, 2), make_method("averaging", 1))
    one = compute_result(swarm, recorder, 1.0)
    first = replace(one, curve=(CurvePoint(1, 1.0, 10.0, 4.0), CurvePoint(2, 2.0, 20.0, 3.0)))
    second = replace(one, curve=(CurvePoint(1, 3.0, 30.0, 2.0),))
    assert mean_curve(RecipeResults("x", (first, second))) == [CurvePoint(1, 2.0, 20.0, 3.0)]

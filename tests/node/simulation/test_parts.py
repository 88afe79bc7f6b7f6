"""Fake signer, shared compute, accounting, batched round machine and curves, each alone."""

import hashlib
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.daemon.state.outer_state import OuterState
from node.simulation.accounting import Accounting
from node.simulation.comparison import RecipeResults
from node.simulation.fake_signer import FakeSigner
from node.simulation.measurement import CurvePoint, CurveRecorder, Evaluator, compute_result
from node.simulation.plot import linear_ticks, log_ticks, mean_curve
from node.simulation.shared_compute import KEPT_ROUNDS, AppliedState, SharedCompute
from node.simulation.swarm import VirtualSwarm, simulated_peer_id
from node.trainer.ipc.channel import ContributionHeader
from optim.exchange import ContributionEncoder
from optim.layout import Layout
from optim.round_plan import RoundPlanner
from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.consensus.events import Action, Event
from protocol.consensus.machine import RoundMachine
from protocol.consensus.messages.contributions import Commit, Contribution, ContributionLimits, Roster
from protocol.consensus.messages.kinds import ReducedPart
from protocol.consensus.messages.signed import SignedMessage
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


def signed_message(signer: FakeSigner, peer: str, body: Contribution) -> SignedMessage[Contribution]:
    return signer.open(signer.signer_for(peer)("contribution", body.to_wire()))


def test_fake_signer_opens_its_messages_and_parses_each_once() -> None:
    signer = FakeSigner(TERMS)
    statement = signed_message(signer, PEERS[0], contribution())
    assert statement.body == contribution() and statement.sender == PEERS[0]
    copy = wire.Signed()
    copy.ParseFromString(statement.signed.SerializeToString())
    assert signer.open(copy) is statement


def test_fake_messages_have_the_size_of_real_ones() -> None:
    identity = Identity.create()
    real = sign(identity, "contribution", RUN, contribution().to_wire())
    ours = FakeSigner(TERMS).signer_for(identity.peer_id)("contribution", contribution().to_wire())
    assert ours.ByteSize() == real.ByteSize()


def test_lists_of_messages_are_opened_with_their_members() -> None:
    signer = FakeSigner(TERMS)
    entries = tuple(signed_message(signer, peer, contribution()) for peer in PEERS)
    roster = Roster(0, 0, b"b" * 32, entries)
    commit = Commit(0, 0, b"b" * 32, entries, (Blob.of(b"sum"),))
    for kind, body in (("roster", roster), ("commit", commit)):
        assert signer.open(signer.signer_for(PEERS[1])(kind, body.to_wire())).body == body


def test_fake_signer_forgets_old_rounds() -> None:
    signer = FakeSigner(TERMS)
    signed = signer.signer_for(PEERS[0])(
        "part", ReducedPart(4, 0, b"r" * 32, 0, 0, Blob.of(b"sum"), b"i" * 32).to_wire()
    )
    statement = signer.open(signed)
    signer.forget_before(4)
    assert signer.open(signed) is statement
    signer.forget_before(5)
    assert signer.open(signed) is not statement


PROGRAM = RoundPlanner(
    make_method("averaging", 1, {"codec": {"kind": "none"}, "topology": {"kind": "gather"}}), Layout(((NUMEL,),)), 1
)


def make_shared_compute(replicas: int = 1) -> SharedCompute:
    return SharedCompute(PROGRAM, lambda *_: 1.0, OuterState.initial(torch.zeros(NUMEL), PROGRAM.method), replicas)


def commit_of(shared: SharedCompute, scale: float) -> Commit:
    parts = ContributionEncoder(PROGRAM).encode(0, torch.linspace(-1, 1, NUMEL) * scale, torch.zeros(NUMEL))
    payload = bytes(parts[0])
    shared.put(payload)
    return Commit(0, 0, b"b" * 32, (signed_message(FakeSigner(TERMS), PEERS[0], contribution(payload)),), ())


def applied(shared: SharedCompute, before: AppliedState, commit: Commit) -> AppliedState:
    return shared.apply_commit(before, commit, commit.contributions)


def test_equal_inputs_give_equal_states_and_different_ones_do_not() -> None:
    first, second = make_shared_compute(), make_shared_compute()
    after = applied(first, first.initial, commit_of(first, 1.0))
    assert applied(first, first.initial, commit_of(first, 1.0)) is after  # computed once
    assert applied(second, second.initial, commit_of(second, 1.0))[1] == after[1]  # computed again with the same result
    assert applied(first, first.initial, commit_of(first, 2.0))[1] != after[1]
    assert applied(first, after, commit_of(first, 1.0))[1] != after[1]
    torch.testing.assert_close(after[0].anchor, -torch.linspace(-1, 1, NUMEL))


def test_payload_that_does_not_decode_is_detected() -> None:
    shared = make_shared_compute()
    good = commit_of(shared, 1.0).blobs[0]
    assert shared.is_well_formed(good, 0, 0)
    assert not shared.is_well_formed(shared.put(b"nonsense"), 0, 0)


def test_shared_compute_keeps_only_recent_rounds() -> None:
    shared = make_shared_compute()
    old = shared.put(b"old")
    shared.begin_round(KEPT_ROUNDS)
    recent = shared.put(b"recent")
    assert shared.read(old) == b"old"
    shared.begin_round(KEPT_ROUNDS + 1)
    assert shared.read(recent) == b"recent"
    with pytest.raises(MissingFileError, match="not kept any more"):
        shared.read(old)
    assert shared.read_payloads([recent, old]) == [] and not shared.is_well_formed(old, KEPT_ROUNDS + 1, 0)


def message(number: int) -> ContributionHeader:
    return ContributionHeader(round=number, sizes=(7,), tokens=10, steps=1, loss=1.0)


def test_accounting_counts_an_inclusion_once_for_all_peers() -> None:
    ledger, parts = Accounting(), (Blob.of(b"payload"),)
    ledger.record_contribution(PEERS[0], message(0), parts)
    entry = signed_message(FakeSigner(TERMS), PEERS[0], contribution())
    for view in (0, 1):
        ledger.record_commit(Commit(0, view, b"b" * 32, (entry,), ()))
    assert ledger.contributions[PEERS[0], 0].times_included == 1
    assert ledger.contribution_bits == 8 * 7
    again = signed_message(FakeSigner(TERMS), PEERS[0], contribution(base=b"c" * 32))
    ledger.record_commit(Commit(0, 0, b"c" * 32, (again,), ()))
    assert ledger.contributions[PEERS[0], 0].times_included == 2
    ledger.record_death(PEERS[0])
    assert ledger.contributions[PEERS[0], 0].end == "died"


def test_accounting_detects_inconsistencies() -> None:
    ledger, signer = Accounting(), FakeSigner(TERMS)
    for peer in PEERS[:2]:
        ledger.record_contribution(peer, message(0), (Blob.of(b"payload"),))
    with pytest.raises(AssertionError, match="two contributions"):
        ledger.record_contribution(PEERS[0], message(0), ())
    first, second = (signed_message(signer, peer, contribution()) for peer in PEERS[:2])
    ledger.record_commit(Commit(0, 0, b"b" * 32, (first,), ()))
    with pytest.raises(AssertionError, match="two commits"):
        ledger.record_commit(Commit(0, 0, b"b" * 32, (first, second), ()))
    invented = signed_message(signer, PEERS[0], contribution(b"another", b"c" * 32))
    with pytest.raises(AssertionError, match="not under way"):
        ledger.record_commit(Commit(0, 0, b"c" * 32, (invented,), ()))


def test_commit_of_dead_peers_is_withdrawn_with_its_successors() -> None:
    ledger, signer = Accounting(), FakeSigner(TERMS)
    parts = (Blob.of(b"payload"),)
    for peer in PEERS[:2]:
        ledger.record_contribution(peer, message(0), parts)
    first, second = (signed_message(signer, peer, contribution()) for peer in PEERS[:2])
    commit = Commit(0, 0, b"b" * 32, (first,), ())
    ledger.record_commit(commit)
    head = hashlib.sha256(b"b" * 32 + commit.content_digest).digest()
    ledger.record_commit(Commit(1, 0, head, (), ()))
    ledger.record_end(PEERS[0], 0, "included")
    ledger.withdraw(b"b" * 32)
    lost = ledger.contributions[PEERS[0], 0]
    assert (ledger.commits, lost.times_included, lost.end) == ({}, 0, "died")
    ledger.record_commit(Commit(0, 0, b"b" * 32, (second,), ()))
    assert [*ledger.commits] == [b"b" * 32] and ledger.contributions[PEERS[1], 0].times_included == 1


@dataclass
class KnownCommits:
    """The chain of a peer that knows one commit of round 0."""

    commit: Commit
    is_alive: bool

    def as_peer(self) -> Any:
        log = SimpleNamespace(commits=[SimpleNamespace(body=self.commit)])
        return SimpleNamespace(is_alive=self.is_alive, chain=SimpleNamespace(round=1, log=log))


@pytest.mark.parametrize("is_alive", [False, True])
def test_round_is_decided_again_only_if_nobody_alive_knows_its_commit(is_alive: bool) -> None:
    swarm = VirtualSwarm(make_config(2, 4), make_method("diloco", 2), make_corpus(), lambda *_: None, lambda: None)
    signer = FakeSigner(TERMS)
    for peer in PEERS[:2]:
        swarm.accounting.record_contribution(peer, message(0), (Blob.of(b"payload"),))
    entries = [signed_message(signer, peer, contribution()) for peer in PEERS[:2]]
    before, after = (Commit(0, 0, b"b" * 32, (entry,), ()) for entry in entries)
    swarm.peers = {PEERS[0]: KnownCommits(before, is_alive).as_peer(), PEERS[1]: KnownCommits(after, True).as_peer()}
    swarm.record_commit(before)
    with pytest.raises(AssertionError, match="two commits") if is_alive else nullcontext():
        swarm.record_commit(after)
    assert swarm.accounting.commits == {b"b" * 32: before if is_alive else after}


@pytest.mark.parametrize("recipe", ["diloco", "sparseloco"])
def test_batched_events_decide_the_same_as_single_ones(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[bytes, bytes]:
        swarm, _ = run_to_target(make_config(5, 6), make_method(recipe, 2))
        return swarm.live_peers[0].chain.digest, swarm.live_peers[0].applied_state[1].digest

    together = run()
    at_once = RoundMachine.handle_all

    def one_by_one(self: RoundMachine, events: Iterable[Event], now: float) -> list[Action]:
        return [action for event in events for action in at_once(self, [event], now)]

    monkeypatch.setattr(RoundMachine, "handle_all", one_by_one)
    assert run() == together


def test_curve_has_its_points_and_always_the_last() -> None:
    recorder = CurveRecorder(Evaluator(make_config(2, 4), make_corpus()), 4)
    shares = [0.1, 0.2, 0.3, 0.5, 0.55, 0.9, 0.95, 1.0]
    assert [share for share in shares if recorder.is_due(share)] == [0.3, 0.5, 0.9, 1.0]
    only_the_end = CurveRecorder(Evaluator(make_config(2, 4), make_corpus()), 1)
    assert [share for share in shares if only_the_end.is_due(share)] == [1.0]


def test_drawn_curve_is_the_mean_over_the_seeds() -> None:
    swarm, recorder = run_to_target(make_config(2, 2), make_method("averaging", 1))
    one = compute_result(swarm, recorder, 1.0)
    first = replace(one, curve=(CurvePoint(1, 1.0, 10.0, 4.0), CurvePoint(2, 2.0, 20.0, 3.0)))
    second = replace(one, curve=(CurvePoint(1, 3.0, 30.0, 2.0),))
    assert mean_curve(RecipeResults("x", (first, second))) == [CurvePoint(1, 2.0, 20.0, 3.0)]


@pytest.mark.parametrize("low, high", [(3.845, 4.83), (0.0, 6.2), (1.0, 1.05), (-2.0, 0.4)])
def test_ticks_are_few_round_numbers_within_the_axis(low: float, high: float) -> None:
    for ticks, ends in ((log_ticks(low, high), (10**low, 10**high)), (linear_ticks(low, high), (low, high))):
        assert 3 <= len(ticks) <= 8
        assert all(ends[0] - 1e-9 <= tick <= ends[1] + 1e-9 for tick in ticks)
        assert all(float(f"{tick:.3g}") == pytest.approx(tick) for tick in ticks)

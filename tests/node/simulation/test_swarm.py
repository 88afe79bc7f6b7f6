"""Whole simulated runs: determinism, complete accounts, and the effects of liars and churn."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
import torch

import node.data.batches
import node.loop.contributions
from node.simulation.adversary import Adversaries, Espionage, LieKind, LyingEncoder, ObservedEncoder
from node.simulation.config import SimulationConfig
from node.simulation.measurement import compute_result
from node.simulation.swarm import VirtualSwarm
from node.simulation.virtual.peer import VirtualPeer
from node.trainer.state import TrainerState
from optim.codecs.base import Payload
from optim.compose import compose
from optim.exchange import ContributionEncoder
from optim.layout import Layout
from optim.method import Method
from optim.options import Scalar
from optim.recipes import RECIPES
from optim.round_plan import RoundPlanner
from protocol.errors import MurmurError
from protocol.manifest.model import ModelSection
from tests.node.simulation.virtual_swarm import BATCH, Tables, make_config, make_method, run_to_target

pytestmark = pytest.mark.slow

BLOCKS = ModelSection(vocabulary=32, width=16, layers=3, heads=2, hidden=40, context=16)
OVERLAP: Tables = {"schedule": {"ahead": 2}}


@pytest.mark.parametrize("recipe", ["diloco", "sparseloco"])
def test_same_seed_gives_the_same_numbers(recipe: str) -> None:
    def run(seed: int) -> object:
        swarm, recorder = run_to_target(make_config(4, 8, seed=seed, churn=0.25), make_method(recipe, 2), points=4)
        return compute_result(swarm, recorder, 1.0), swarm.accounting.rejections, swarm.clock.now

    assert run(3) == run(3)
    assert run(3) != run(4)


@pytest.mark.parametrize("recipe", ["diloco", "sparseloco", "averaging"])
def test_two_peers_with_the_same_data_equal_one(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(peers: int) -> bytes:
        swarm, _ = run_to_target(make_config(peers, 6), make_method(recipe, 3, whole))
        return swarm.live_peers[0].applied_state[1].digest

    # The token count is part of the state, and is twice as large with two peers.
    whole: Tables = {"update": {"shorten": False}} if recipe == "diloco" else {}
    assert end(2) != end(1)  # different data does matter
    monkeypatch.setattr(node.data.batches, "order_key", lambda seed, peer, source: seed)
    assert end(2) == end(1)


@pytest.mark.parametrize("recipe", ["diloco", "sparseloco"])
@pytest.mark.parametrize("tables", [{}, OVERLAP])
def test_all_peers_end_on_one_chain_and_one_state(recipe: str, tables: Tables) -> None:
    swarm, _ = run_to_target(make_config(5, 8, speeds=(1.0, 1.0, 1.3, 1.0, 0.7)), make_method(recipe, 2, tables))
    assert len(swarm.live_peers) == 5
    assert len({(peer.chain.head, peer.applied_state[1].digest) for peer in swarm.live_peers}) == 1
    assert swarm.live_peers[0].chain.tokens >= swarm.config.target_tokens


def shortened(recipe: str) -> Method:
    """Return the recipe with a period of four steps."""
    options: dict[str, Scalar] = {}
    schedule = compose(recipe).schedule
    if schedule.inner_steps > 4:
        options = {"inner_steps": 4, "ahead": min(4, schedule.ahead), "delay": min(4, schedule.delay)}
    return compose(recipe, {"schedule": options})


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_reaches_its_target_and_loses_nothing(recipe: str) -> None:
    method = shortened(recipe)
    swarm, recorder = run_to_target(make_config(4, 12, speeds=(1.0, 1.0, 1.3, 0.8), model=BLOCKS), method)
    states = {(peer.chain.head, peer.applied_state[1].digest) for peer in swarm.live_peers}
    assert len(swarm.live_peers) == 4 and len({head for head, _ in states}) == 1
    assert method.topology.kind == "groups" or len(states) == 1
    assert unaccounted(swarm) == 0
    assert math.isfinite(recorder.curve[-1].loss)


def test_equal_peers_stop_exactly_at_the_target() -> None:
    swarm, _ = run_to_target(make_config(3, 7), make_method("averaging", 3))
    assert swarm.live_peers[0].chain.tokens == 3 * 7 * BATCH
    assert swarm.live_peers[0].chain.round == 3  # after 3, 6 and 7 steps


@pytest.mark.parametrize("recipe", ["diloco", "sparseloco"])
def test_sent_bytes_are_those_of_the_encoded_contributions(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = ContributionEncoder.encode

    def count(
        self: ContributionEncoder,
        round_number: int,
        delta: torch.Tensor,
        residual: torch.Tensor,
        trained: Sequence[bool] = (),
    ) -> list[Payload]:
        parts = encode(self, round_number, delta, residual, trained)
        encoded.extend(len(part) for part in parts)
        return parts

    monkeypatch.setattr(ContributionEncoder, "encode", count)
    swarm, recorder = run_to_target(make_config(4, 6), make_method(recipe, 3))
    assert swarm.accounting.contribution_bits == 8 * sum(encoded)
    sums = [blob.size for commit in swarm.accounting.commits.values() for blob in commit.parts]
    # Gather: each message goes to the three others. Butterfly: each part to its reducer, each sum to the three others.
    expected = 3 * sum(sums) + 3 * sum(encoded) // 4 if sums else 3 * sum(encoded)
    assert sum(swarm.network.blob_bytes) == expected
    figures = compute_result(swarm, recorder, 1.0)
    assert figures.bits_per_parameter_sync == 8 * sum(encoded) / 8 / swarm.numel
    assert figures.bits_per_parameter_step == pytest.approx(figures.bits_per_parameter_sync / 3)


def virtual_time(given: SimulationConfig, composed: Method) -> tuple[float, float]:
    swarm, recorder = run_to_target(given, composed)
    figures = compute_result(swarm, recorder, 1.0)
    return figures.virtual_seconds, figures.compute_share


def test_narrow_links_cost_time_that_overlap_hides() -> None:
    wide, wide_share = virtual_time(make_config(4, 12), make_method("diloco", 3))
    narrow, narrow_share = virtual_time(make_config(4, 12, bandwidth=2e4), make_method("diloco", 3))
    hidden, hidden_share = virtual_time(
        make_config(4, 12, bandwidth=2e4), make_method("diloco", 3, {"schedule": {"ahead": 3}})
    )
    assert 12 < wide < narrow
    assert 12 < hidden < narrow
    assert narrow_share < hidden_share
    assert narrow_share < wide_share < 1


def test_faster_swarm_takes_less_time() -> None:
    slow, _ = virtual_time(make_config(3, 6), make_method("diloco", 3))
    fast, _ = virtual_time(make_config(3, 6, speeds=(2.0,) * 3), make_method("diloco", 3))
    assert slow - fast == pytest.approx(3.0, abs=0.1)


def unaccounted(swarm: VirtualSwarm) -> int:
    """Return the survivors' trained tokens that are neither included nor still to be sent.

    A contribution may carry more work than it may claim: it counts with all of it here, and its claim is checked.
    """
    lost, made = 0, {entry.parts: entry.tokens for entry in swarm.accounting.contributions.values()}
    for peer in swarm.live_peers:
        included = 0
        for commit in swarm.accounting.commits.values():
            for body in (entry.body for entry in commit.contributions if entry.sender == peer.peer_id):
                assert body.tokens == min(made[body.parts], swarm.limits.max_tokens)
                included += made[body.parts]
        assert peer.trainer is not None
        counters = peer.trainer.state.counters
        waiting = counters.unreported + counters.since_message
        outstanding = counters.outstanding  # included, where its result is only to be taken some steps later
        if outstanding and swarm.accounting.contributions[peer.peer_id, outstanding.round].end != "included":
            waiting += outstanding.work
        lost += abs(counters.tokens - included - waiting.tokens)
    return lost


@pytest.mark.parametrize("recipe", ["diloco", "sparseloco"])
@pytest.mark.parametrize("seed", range(3))
def test_survivors_of_churn_agree_and_lose_nothing(recipe: str, seed: int) -> None:
    swarm, _ = run_to_target(make_config(6, 24, seed=seed, churn=0.2), make_method(recipe, 3))
    assert swarm.accounting.state_syncs > 0 and swarm.accounting.replays > 0
    assert len({(peer.chain.head, peer.applied_state[1].digest) for peer in swarm.live_peers}) == 1
    ends = {"included": {1}, "given back": {0}, "under way": {0}, "died": {0, 1}}
    for entry in swarm.accounting.contributions.values():
        assert entry.times_included in ends[entry.end]
    committed = sum(commit.tokens for commit in swarm.accounting.commits.values())
    assert committed == swarm.live_peers[0].chain.tokens
    assert unaccounted(swarm) == 0


SLOW_LINKS = make_config(4, 12, speeds=(1.0, 1.0, 1.0, 0.5), bandwidth=5e3)


def test_contribution_that_misses_its_round_joins_the_next() -> None:
    swarm, _ = run_to_target(SLOW_LINKS, make_method("diloco", 3))
    made = {(peer, entry.parts): number for (peer, number), entry in swarm.accounting.contributions.items()}
    ages = [
        commit.round - made[entry.sender, entry.body.parts]
        for commit in swarm.accounting.commits.values()
        for entry in commit.contributions
    ]
    assert {0, 1} <= set(ages) <= {0, 1, 2}, "sizes of messages, and so times, differ a little between processors"
    assert unaccounted(swarm) == 0


def test_contribution_that_no_round_includes_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.loop.contributions, "MAX_AGE_ROUNDS", 0)  # after the first that does not
    swarm, _ = run_to_target(SLOW_LINKS, make_method("diloco", 3))
    assert any(entry.end == "given back" for entry in swarm.accounting.contributions.values())
    assert unaccounted(swarm) == 0

    adopt = TrainerState.apply_anchor
    monkeypatch.setattr(
        TrainerState,
        "apply_anchor",
        lambda self, number, fate, **others: adopt(self, number, "included" if fate == "excluded" else fate, **others),
    )
    forgetful, _ = run_to_target(SLOW_LINKS, make_method("diloco", 3))
    assert unaccounted(forgetful) > 0


def loss_with(liars: Adversaries | None, tables: Tables) -> float:
    given = replace(make_config(8, 30, learning_rate=3e-2), adversaries=liars)
    _, recorder = run_to_target(given, make_method("averaging", 5, tables))
    return recorder.curve[-1].loss


def test_liars_hurt_the_mean_and_clipping_helps() -> None:
    honest, flipped = loss_with(None, {}), loss_with(Adversaries(0.25, "sign-flip"), {})
    loud = Adversaries(0.25, "scale10")
    scaled, clipped = loss_with(loud, {}), loss_with(loud, {"aggregate": {"clip": True}})
    print(f"honest {honest:.3f}, sign-flip {flipped:.3f}, scale10 {scaled:.3f}, clipped {clipped:.3f}")
    assert honest < flipped - 0.1
    assert honest < scaled - 0.25
    assert abs(clipped - honest) < 0.1


@pytest.mark.parametrize("kind", get_args(LieKind))
def test_contributions_of_liars(kind: LieKind) -> None:
    composed = make_method("averaging", 1, {"codec": {"kind": "none"}})
    delta = torch.linspace(-1, 1, 100)
    sender = LyingEncoder(RoundPlanner(composed, Layout(((100,),)), 1), kind, 0)
    sent = composed.codec.decode(sender.encode(0, delta.clone(), torch.zeros(100))[0], 100)
    works = ("fewer-steps", "wrong-data", "garbled-text", "stale-replay", "late-replay", "quiet-backdoor")
    true = dict.fromkeys(("alie", "copy", *works), delta)
    expected = true | {
        "sign-flip": -delta,
        "scale10": 10 * delta,
        "scale1000": 1000 * delta,
        "zero": torch.zeros(100),
        "inner-product": delta * -0.5,
        "backdoor": 5 * delta,
    }
    if kind in expected:
        assert torch.equal(sent, expected[kind])
    else:
        assert not torch.equal(sent, delta)
        torch.testing.assert_close(sent.norm(), delta.norm())


def test_liars_know_what_the_honest_send() -> None:
    composed, espionage = make_method("averaging", 1, {"codec": {"kind": "none"}}), Espionage()
    planner = RoundPlanner(composed, Layout(((100,),)), 1)
    deltas = [torch.linspace(-1, 1, 100), torch.linspace(0, 1, 100)]
    sent = [
        bytes(ObservedEncoder(planner, slot, espionage).encode(0, delta.clone(), torch.zeros(100))[0])
        for slot, delta in enumerate(deltas)
    ]
    rows = torch.stack(deltas)
    expected: dict[LieKind, torch.Tensor] = {
        "inner-product": rows.mean(0) * -0.5,
        "alie": rows.mean(0) - 1.5 * rows.std(0),
        "copy": deltas[0],
    }
    for kind, lie in expected.items():
        payload = LyingEncoder(planner, kind, 0, espionage).encode(0, torch.ones(100), torch.zeros(100))[0]
        torch.testing.assert_close(composed.codec.decode(payload, 100), lie)
        assert (bytes(payload) == sent[0]) == (kind == "copy")


def test_stalled_swarm_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VirtualPeer, "receive", lambda self, signed: None)
    with pytest.raises(MurmurError, match="no round was decided for 806 virtual seconds; allow more"):
        run_to_target(make_config(3, 6), make_method("diloco", 3))


def test_hundred_peers_are_fast() -> None:
    """The limit is CPU time, because other programs may run at the same time."""
    large = make_config(100, 2, model=ModelSection(vocabulary=32, width=24, layers=1, heads=2, hidden=96, context=16))
    started = time.process_time()
    swarm, _ = run_to_target(large, make_method("diloco", 1))
    took = time.process_time() - started
    print(
        f"{swarm.numel} parameters: {took:.1f} s, of that {swarm.accounting.logic_seconds:.1f} s in the round machines"
    )
    assert len({peer.applied_state[1].digest for peer in swarm.live_peers}) == 1
    assert all(entry.times_included == 1 for entry in swarm.accounting.contributions.values())
    assert (swarm.live_peers[0].chain.round, len(swarm.accounting.contributions)) == (2, 200)
    assert took < 20

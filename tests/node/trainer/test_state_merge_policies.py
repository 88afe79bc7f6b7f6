"""How peers go over to a new anchor (optim.merge_policy), step by step as a trainer does it, beside the formulas."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from node.model import initial_weights
from optim.inner.base import FIRST_MOMENT, SECOND_MOMENT
from optim.options import Scalar
from tests.node.trainer.state_harness import MODEL, NUMEL, StateHarness, Swarm
from tests.optim.fake_peers import LOSSLESS, Tables

Gather = Callable[..., Swarm]
PERIOD = 4
SCHEDULE: dict[str, Scalar] = {"inner_steps": PERIOD}
DILOCO: Tables = {"codec": {"kind": "none"}, "schedule": SCHEDULE}


@pytest.fixture
def gather() -> Iterator[Gather]:
    made: list[Swarm] = []

    def build(recipe: str, tables: Tables, peers: int = 2) -> Swarm:
        made.append(Swarm(recipe, tables, peers))
        return made[-1]

    yield build
    for swarm in made:
        swarm.close()


def schedule(**options: Scalar) -> Tables:
    return {"schedule": {**SCHEDULE, **options}}


def run(swarm: Swarm, steps: int) -> Swarm:
    for _ in range(steps):
        swarm.step()
    return swarm


def test_streaming_with_one_fragment_at_once_and_nothing_kept_is_diloco_bit_for_bit(gather: Gather) -> None:
    streaming = DILOCO | {"adoption": {"kind": "mix", "alpha": 0.0}} | schedule(fragments=1, ahead=0, delay=0)
    one, other = (
        run(gather("diloco", DILOCO), 5 * PERIOD + 1),
        run(gather("streaming-diloco", streaming), 5 * PERIOD + 1),
    )
    assert len(one.anchors) == 6
    assert all(torch.equal(*pair) for pair in zip(one.anchors, other.anchors, strict=True))
    assert torch.equal(one.slots["momentum"], other.slots["momentum"])
    assert torch.equal(one.peers[0].weights, other.peers[0].weights)
    # The control: whoever keeps a part of its own is elsewhere as soon as it trained on while the message travelled.
    late = DILOCO | {"adoption": {"kind": "mix", "alpha": 0.5}} | schedule(ahead=2, delay=2)
    assert not torch.equal(run(gather("streaming-diloco", late), 5 * PERIOD + 1).anchors[-1], one.anchors[-1])


def test_diloco_is_what_a_loop_over_the_formulas_gives(gather: Gather) -> None:
    swarm = run(gather("diloco", DILOCO), 3 * PERIOD + 1)
    phi, momentum = initial_weights(MODEL, 0), torch.zeros(NUMEL)
    again = Swarm("diloco", DILOCO, 2)
    for _ in range(3):
        for _ in range(PERIOD):
            again.step_number += 1
            for index, peer in enumerate(again.peers):
                peer.train(1000 * again.step_number + index, steps=1)
        delta = torch.stack([phi - peer.weights for peer in again.peers]).mean(0)
        momentum = 0.9 * momentum + delta
        phi = phi - 0.7 * (delta + 0.9 * momentum)
        for peer in again.peers:
            peer.weights.copy_(phi)
    again.close()
    torch.testing.assert_close(swarm.anchors[3], phi, atol=1e-6, rtol=1e-5)


def test_mixing_with_alpha_one_leaves_the_weights_to_the_bit(gather: Gather) -> None:
    times = schedule(fragments=1, ahead=2, delay=2)
    swarm = gather("streaming-diloco", DILOCO | {"adoption": {"kind": "mix", "alpha": 1.0}} | times, peers=1)
    alone = swarm.peers[0].weights.clone()
    for step in range(1, 3 * PERIOD + 2):
        swarm.step()
        alone.add_(_step(step, 0))
        assert torch.equal(swarm.peers[0].weights, alone), "as if there were no exchange"
    assert len(swarm.anchors) == 4 and not torch.equal(swarm.anchors[-1], swarm.anchors[0])


def _step(step: int, index: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1000 * step + index)) * 1e-2


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5])
def test_mixing_gives_the_part_of_its_own_that_the_formula_says(gather: Gather, alpha: float) -> None:
    """theta <- alpha * theta(t + tau) + (1 - alpha) * phi, on the fragment of the round; the others train on."""
    tables = DILOCO | {"adoption": {"kind": "mix", "alpha": alpha}} | schedule(fragments=2, ahead=1, delay=1)
    swarm = gather("streaming-diloco", tables)
    peer, before = swarm.peers[0], torch.zeros(NUMEL)
    for step in range(1, 3 * PERIOD):
        rounds, own = peer.state.counters.round, peer.weights.clone()
        swarm.step()
        before = own
        if peer.state.counters.round > rounds:
            mask = torch.zeros(NUMEL, dtype=torch.bool)
            for start, stop in swarm.program.plan(rounds).spans:
                mask[start:stop] = True
            phi = swarm.anchors[peer.state.counters.round]
            expected = torch.where(mask, alpha * before + (1 - alpha) * phi, before) + _step(step, 0)
            torch.testing.assert_close(peer.weights, expected, atol=1e-6, rtol=1e-5)
    assert peer.state.counters.round >= 4


def test_starting_again_from_the_anchor_a_round_late_is_co2(gather: Gather) -> None:
    """One peer, alpha 1, beta 0: x_{t+1} = x_t + (y_{t-1} - x_{t-1})."""
    tables = LOSSLESS | {"adoption": {"kind": "carry", "keep": 0.0}} | schedule(ahead=PERIOD, delay=PERIOD)
    swarm = gather("averaging", tables, peers=1)
    peer, begun, ended = swarm.peers[0], [], []
    for step in range(7 * PERIOD):
        if step % PERIOD == 0:
            ended.append(peer.weights.clone())
        swarm.step()
        if step % PERIOD == 0:
            begun.append(peer.weights - _step(swarm.step_number, 0))
    x, y = begun, ended[1:]
    assert len(swarm.anchors) == 7
    for t in range(2, 6):
        torch.testing.assert_close(x[t + 1], x[t] + (y[t - 1] - x[t - 1]), atol=1e-5, rtol=1e-5)
        # The control: from the current anchor's drift a round would be lost or counted twice.
        assert not torch.allclose(x[t + 1], x[t] + (y[t] - x[t]), atol=1e-3)


def test_what_is_kept_is_a_loan_until_the_merge_comes(gather: Gather) -> None:
    """Eager updates: theta = phi(t) + keep * (own progress of the last round), which the next anchor replaces."""
    tables = LOSSLESS | {"adoption": {"kind": "carry", "keep": 0.5}} | schedule(ahead=PERIOD, delay=PERIOD)
    swarm = gather("averaging", tables)
    peer, made = swarm.peers[0], torch.zeros(NUMEL)
    for step in range(1, 6 * PERIOD):
        rounds = peer.state.counters.round
        swarm.step()
        if peer.state.counters.round > rounds:
            phi = swarm.anchors[peer.state.counters.round]
            torch.testing.assert_close(peer.weights, phi + 0.5 * made + _step(step, 0), atol=1e-5, rtol=1e-5)
            made = torch.zeros(NUMEL)
        made = made + _step(step, 0) if (step - 1) // PERIOD > 0 else made
    assert peer.state.counters.round == 4


ADOPTIONS: list[dict[str, Scalar]] = [{"kind": "carry", "keep": keep} for keep in (0.0, 0.125, 0.5, 1.0)]
SCHEDULES = [
    schedule(),
    schedule(ahead=2),
    schedule(ahead=PERIOD, delay=PERIOD),
    schedule(ahead=3, delay=2),
    schedule(fragments=2, ahead=1, delay=1),
    schedule(fragments=3),
]
CODECS: list[dict[str, Scalar]] = [{"kind": "none"}, {"kind": "topk", "k": 32, "chunk": 512}, {"kind": "int4"}]


@pytest.mark.parametrize("adoption", ADOPTIONS, ids=str)
@pytest.mark.parametrize("times", SCHEDULES, ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_nothing_is_lost_or_counted_twice(
    gather: Gather, adoption: dict[str, Scalar], times: Tables, codec: dict[str, Scalar]
) -> None:
    """Sent, left in the residual and not sent yet are all progress made; also where messages were dropped."""
    swarm = gather("averaging", times | {"adoption": adoption, "codec": codec})
    swarm.dropped |= {(1, 0), (4, 1), (5, 1)}
    run(swarm, 7 * PERIOD + 3)
    assert len(swarm.anchors) > 6
    for peer, sent, progress in zip(swarm.peers, swarm.sent, swarm.progress, strict=True):
        left = peer.state.residual + (peer.state.reference - peer.weights)
        torch.testing.assert_close(sent + left, -progress, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_negative_control_without_the_residual_steps_are_lost(gather: Gather, keep: float) -> None:
    times = schedule(ahead=2, delay=2)
    swarm = gather("averaging", LOSSLESS | times | {"adoption": {"kind": "carry", "keep": keep}}, peers=1)
    peer = swarm.peers[0]
    for _ in range(5 * PERIOD):
        swarm.step()
        peer.state.residual.zero_()
    lost = swarm.sent[0] + (peer.state.reference - peer.weights) + swarm.progress[0]
    assert float(lost.norm()) > 0.1 * float(swarm.progress[0].norm())


def test_all_periods_of_one_give_every_peer_the_mean_of_weights_and_moments(gather: Gather) -> None:
    swarm = gather("local-adam", schedule(), peers=3)
    for index, peer in enumerate(swarm.peers):
        for place, name in enumerate((FIRST_MOMENT, SECOND_MOMENT)):
            seed = torch.Generator().manual_seed(10 * index + place)
            peer.optimizer.vectors[name].copy_(torch.rand(NUMEL, generator=seed) * 1e-3)
    for _ in range(PERIOD):
        swarm.step()
    means = [torch.stack([_carried(peer)[place] for peer in swarm.peers]).mean(0) for place in range(3)]
    swarm.step()
    for index, peer in enumerate(swarm.peers):
        found = _carried(peer)
        found[0] = found[0] - _step(swarm.step_number, index)
        for vector, mean in zip(found, means, strict=True):
            torch.testing.assert_close(vector, mean, atol=1e-6, rtol=1e-5)


def _carried(peer: StateHarness) -> list[Tensor]:
    return [peer.weights.clone(), *(peer.optimizer.vectors[name].clone() for name in (FIRST_MOMENT, SECOND_MOMENT))]


@pytest.mark.parametrize("recipe", ["noloco", "noloco-weights", "gossip-adam"])
def test_progress_that_no_round_took_lives_on_where_it_cannot_be_sent_later(recipe: str) -> None:
    bench = StateHarness(recipe)
    try:
        start = bench.weights.clone()
        bench.weights.add_(0.25)
        bench.state.count_step(24, 1.0, 1)
        bench.state.make_contribution()
        bench.weights.add_(0.5)  # while it travels
        bench.share(1, start)  # whoever is not included has the anchor that it had
        bench.state.apply_anchor(1, "excluded")
        assert torch.allclose(bench.weights, start + 0.75, atol=1e-6)
        # The control: a delta comes back into the residual instead, and the weights keep what came after it.
        assert not bench.state.residual.any()
    finally:
        bench.close()


@pytest.mark.parametrize(("recipe", "moments"), [("diloco", 0), ("local-adam", 12)])
def test_a_newcomer_is_as_old_as_the_run_and_its_moments_as_what_they_came_from(recipe: str, moments: int) -> None:
    bench = StateHarness(recipe, {"schedule": {"inner_steps": 4}})
    try:
        bench.share(3, bench.weights.clone())
        bench.state.start(3)
        assert (bench.optimizer.age_at_join, bench.optimizer.moments_age_at_join) == (12, moments)
        bench.state.save()
        again = StateHarness(recipe, {"schedule": {"inner_steps": 4}}, bench.arena)
        assert (again.optimizer.age_at_join, again.optimizer.moments_age_at_join) == (12, moments), (
            "after a death as well"
        )
    finally:
        bench.close()

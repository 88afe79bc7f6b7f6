"""Projections onto random directions, one byte each."""

import numpy as np
import pytest
import torch

from optim.codecs.bits.deterministic_random import seed_from_values
from optim.codecs.random_projection import LEVELS, RandomProjection
from optim.compose import compose
from optim.errors import CodecError, UnknownOption
from optim.round_plan import RoundPlanner
from tests.optim.fake_peers import LAYOUT, NUMEL, FakePeer


def draw(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def test_contribution_is_the_projection_to_the_precision_of_a_byte() -> None:
    """For a linear loss, p is exactly <gradient, z>: the difference quotient of the paper."""
    values = draw(5000, 1)
    decoded = RandomProjection().decode(RandomProjection().encode(values), 5000)
    size, signs = float(decoded.abs()[0]), decoded.sign()
    assert decoded.abs().eq(size).all() and 0.45 < float((signs > 0).float().mean()) < 0.55
    projection = float(values.double() @ signs.double())
    assert size == pytest.approx(projection, rel=0.25)  # and of the same sign: up to one step of two bits
    eps, there, back = 1e-3, values.double(), signs.double()
    quotient = float((there @ (eps * back) - there @ (-eps * back)) / (2 * eps))
    assert quotient == pytest.approx(projection)


@pytest.mark.parametrize("directions", [1, 8])
def test_mean_over_many_contributions_is_the_vector(directions: int) -> None:
    codec, base, count = RandomProjection(directions=directions), draw(64, 2), 6000
    total, plain = torch.zeros(64), torch.zeros(64)
    for seed in range(count):
        values = base + draw(64, 1000 + seed) * 1e-3  # another seed each time
        decoded = codec.decode(codec.encode(values), 64)
        total += decoded / count
        plain += decoded.sign() / count
    assert float((total - base).norm() / base.norm()) < 2.5 * (64 / directions / count) ** 0.5
    assert float((plain - base).norm() / base.norm()) > 0.4, (
        "the control: directions without their sizes are not the mean"
    )


def test_zero_vector_is_exact() -> None:
    codec = RandomProjection(directions=3)
    assert not codec.decode(codec.encode(torch.zeros(1000)), 1000).any()


def test_levels_ascend_and_large_values_are_clipped() -> None:
    assert LEVELS[0] == 0 and (np.diff(LEVELS) > 0).all() and LEVELS.size == 128
    huge = [
        RandomProjection().decode(RandomProjection().encode(torch.full((101,), 1e6 + seed)), 101) for seed in range(20)
    ]
    assert max(float(decoded.abs().max()) for decoded in huge) == LEVELS[-1]


def test_rounding_is_unbiased() -> None:
    """A value between two levels is rounded up with the probability of its distance from the lower one."""
    codes = [
        RandomProjection().decode(RandomProjection().encode(torch.tensor([1.1 + n * 1e-6])), 1)[0].item()
        for n in range(4000)
    ]
    assert set(codes) == {1.0, 1.25}
    assert float(np.mean(codes)) == pytest.approx(1.102, abs=0.01)


@pytest.mark.parametrize("step", [1, 64, 1000, 70_000])
def test_decoded_span_equals_the_whole(step: int) -> None:
    values = draw(150_000, 3)
    vector = RandomProjection(directions=2).decode_vector(RandomProjection(directions=2).encode(values), 150_000)
    whole = vector.to_dense()
    starts = range(0, 150_000, max(step, 7919)) if step < 1000 else range(0, 150_000, step)
    for start in starts:
        part = slice(start, min(start + step, 150_000))
        assert np.array_equal(vector.decode_slab(part), whole[part])


def test_members_with_other_gradients_draw_other_directions() -> None:
    seeds = {seed_from_values(draw(3000, seed).numpy()) for seed in range(50)}
    assert len(seeds) == 50
    assert seed_from_values(draw(3000, 1).numpy()) == seed_from_values(draw(3000, 1).numpy())


def test_a_signed_zero_and_another_length_are_refused() -> None:
    payload = bytes(RandomProjection().encode(draw(100, 4)))
    with pytest.raises(CodecError, match="sign"):
        RandomProjection().decode_vector(payload[:-1] + b"\x80", 100)
    with pytest.raises(CodecError, match="length"):
        RandomProjection().decode_vector(payload, 101)


def test_error_feedback_is_refused_because_the_residual_would_grow() -> None:
    rest = draw(1000, 6)
    before = float(rest.norm())
    for _ in range(3):
        RandomProjection().encode_and_subtract(rest)
    assert float(rest.norm()) > 100 * before
    with pytest.raises(UnknownOption, match="feedback.kind = 'none'"):
        compose("diloco", {"codec": {"kind": "direction"}})


def test_new_peer_replays_the_log_to_the_same_bits() -> None:
    planner = RoundPlanner(compose("spsa"), LAYOUT, 1)
    peers = [FakePeer(planner) for _ in range(3)]
    log = [[peer.encode(number, 10 * number + place) for place, peer in enumerate(peers)] for number in range(30)]
    assert max(len(part) for contributions in log for parts in contributions for part in parts) == 15
    new_peer = FakePeer(planner)
    for replica in (peers[0], new_peer):
        for number, contributions in enumerate(log):
            replica.apply(number, contributions, [1.0] * 3)
    assert torch.equal(peers[0].anchor, new_peer.anchor) and peers[0].anchor.any()


def test_training_with_one_byte_per_member_reduces_the_loss() -> None:
    """A quadratic whose gradient four members send in one byte each.

    The control: a step as large as the true gradient allows is too large here, by the number of weights.
    """
    target = draw(NUMEL, 5)

    def distance(rate: float) -> float:
        planner = RoundPlanner(compose("spsa", {"update": {"learning_rate": rate}}), LAYOUT, 1)
        peers = [FakePeer(planner) for _ in range(4)]
        for number in range(200):
            gradient = peers[0].anchor - target
            size = min(1.0, 1.0 / float(gradient.norm()))
            contributions = [
                peer.encoder.encode(number, gradient * size + draw(NUMEL, 7 * number + place) * 1e-4, peer.residual)
                for place, peer in enumerate(peers)
            ]
            for peer in peers:
                peer.apply(number, contributions, [1.0] * 4)
        return float((peers[0].anchor - target).norm() / target.norm())

    assert distance(2e-2) < 0.99
    assert distance(1.0) > 1

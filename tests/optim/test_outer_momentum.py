import pytest
import torch

from optim.outer import DelayedNesterov, Nesterov, OuterOptimizer, OuterStep, StalenessPenalised

NUMEL = 40


def random_delta(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def run(
    update: OuterOptimizer, deltas: list[torch.Tensor], decay: float = 1.0
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the anchor after each round, and the slots after the last."""
    anchor, slots, path = torch.zeros(NUMEL), {name: torch.zeros(NUMEL) for name in update.slots}, []
    for number, delta in enumerate(deltas):
        update.apply(anchor, slots, delta, OuterStep(number, rate_decay=decay))
        path.append(anchor.clone())
    return path, slots


@pytest.mark.parametrize("period", [1, 2, 4])
def test_delayed_nesterov_is_nesterov_on_the_mean_of_a_period(period: int) -> None:
    deltas = [random_delta(seed) for seed in range(5 * period)]
    means = [torch.stack(deltas[start : start + period]).mean(0) for start in range(0, len(deltas), period)]
    late, _ = run(DelayedNesterov(period=period), deltas)
    plain, _ = run(Nesterov(), means)
    for number, anchor in enumerate(plain, start=1):
        assert torch.allclose(late[number * period - 1], anchor, atol=1e-5)


def test_within_a_period_only_fresh_progress_moves_the_anchor() -> None:
    update = DelayedNesterov(period=3, learning_rate=0.6)
    path, slots = run(update, [random_delta(seed) for seed in range(3)])
    moved = run(update, [random_delta(seed) for seed in range(5)])[0]
    assert torch.allclose(moved[3] - path[2], -0.6 * random_delta(3) / 3, atol=1e-6)
    assert torch.allclose(moved[4] - moved[3], -0.6 * random_delta(4) / 3, atol=1e-6)
    assert not slots["gathered"].any()


def test_momentum_in_every_stale_update_moves_much_farther() -> None:
    """The four quarters of the peers contribute the same progress."""
    deltas = [torch.ones(NUMEL)] * 16
    late, _ = run(DelayedNesterov(period=4), deltas)
    every, _ = run(Nesterov(), deltas)
    once, _ = run(Nesterov(), deltas[:4])
    assert torch.allclose(late[-1], once[-1], atol=1e-5)
    assert float(every[-1][0]) < 4 * float(late[-1][0])


PLAIN = StalenessPenalised(penalty=False, clip=1e9, momentum=0.0)


def test_late_progress_without_momentum_is_not_lost() -> None:
    """x_(t+1) = x_t + (y_(t-1) - x_(t-1)): all progress arrives, one round late."""
    path, _ = run(PLAIN, [random_delta(seed) for seed in range(6)])
    assert torch.allclose(path[-1], -sum((random_delta(seed) for seed in range(6)), torch.zeros(NUMEL)), atol=1e-5)


def test_penalty_is_the_gap_over_its_running_mean() -> None:
    update, rate, mu = StalenessPenalised(clip=1e9, learning_rate=0.9), 0.1, 0.5
    deltas = [random_delta(seed) * scale for seed, scale in enumerate([1, 1, 1, 5, 1, 1, 0.1, 1, 1, 1, 1, 1, 1])]
    path, _ = run(update, deltas)
    anchor, momentum, mean = torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
    for number, delta in enumerate(deltas):
        weight = max(rate, 1 / max(1, number))
        mean = mean + weight * (momentum.abs() - mean)
        penalty = 1 + float(momentum.norm() / mean.norm()) if number else 1.0
        momentum = mu * momentum + delta / penalty
        anchor = anchor - 0.9 * momentum
        assert torch.allclose(path[number].double(), anchor, atol=1e-4)


def test_large_step_of_the_anchor_lowers_the_weight_of_late_progress() -> None:
    steady = [torch.full((NUMEL,), 1e-2)] * 8
    moved = []
    for leap in (1.0, 20.0):
        path, _ = run(StalenessPenalised(clip=1e9, momentum=0.0), [*steady, steady[0] * leap, steady[0]])
        moved.append(float((path[-1] - path[-2]).norm()))
    assert moved[1] < moved[0] / 3
    unpenalised, _ = run(PLAIN, [*steady, steady[0] * 20, steady[0]])
    assert float((unpenalised[-1] - unpenalised[-2]).norm()) == pytest.approx(float(steady[0].norm()), rel=1e-3)


def test_momentum_decays_without_progress() -> None:
    _, slots = run(StalenessPenalised(momentum=0.5, clip=1e9), [random_delta(0), *[torch.zeros(NUMEL)] * 5])
    assert torch.allclose(slots["momentum"], random_delta(0) / 32, atol=1e-6)


@pytest.mark.parametrize("decay", [1.0, 0.1])
def test_clip_bounds_every_coordinate_and_follows_the_learning_rate(decay: float) -> None:
    """In the public code the clamped vector is discarded, so that nothing is clipped."""
    deltas = [random_delta(seed) for seed in range(4)]
    clipped, _ = run(StalenessPenalised(penalty=False, clip=0.2), deltas, decay)
    moved = torch.stack(
        [after - before for before, after in zip([torch.zeros(NUMEL), *clipped], clipped, strict=False)]
    )
    assert float(moved.abs().max()) == pytest.approx(0.2 * decay, rel=1e-3)
    loose, _ = run(StalenessPenalised(penalty=False, clip=1e9), deltas, decay)
    off, _ = run(StalenessPenalised(penalty=False, clip=1e6), deltas, decay)
    assert torch.equal(loose[-1], off[-1]) and not torch.equal(loose[-1], clipped[-1])

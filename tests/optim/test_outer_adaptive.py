import pytest
import torch

from optim.codecs.sign import BlockSign
from optim.outer import Adam, FrozenAdam, OuterStep

NUMEL, ROUNDS, WARM = 2048, 12, 6
QUIET = 100  # weights that never have a gradient


def gradient(number: int) -> torch.Tensor:
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(number)) * torch.linspace(0.1, 3, NUMEL)
    values[:QUIET] = 0
    return values


class FrozenAdamRun:
    """Applies FrozenAdam to the merged momentum, round after round."""

    def __init__(self, update: FrozenAdam) -> None:
        self.update = update
        self.anchor = torch.ones(NUMEL)
        self.slots = {name: torch.zeros(NUMEL) for name in update.slots}
        self.residual = torch.zeros(NUMEL)

    def run_round(self, number: int) -> None:
        contribution = self.slots["first_moment"] * 0.9 + gradient(number) * 0.1
        if number >= WARM:
            total = self.residual + contribution
            contribution = BlockSign().decode(BlockSign().encode(total), NUMEL)
            self.residual = total - contribution
        self.update.apply(self.anchor, self.slots, contribution, OuterStep(number, matrix_spans=((0, 500),)))


def test_frozen_adam_is_adam_during_warm_rounds() -> None:
    run, plain = FrozenAdamRun(FrozenAdam(warm_rounds=WARM)), Adam(clip=1e9)
    anchor, slots = torch.ones(NUMEL), {name: torch.zeros(NUMEL) for name in plain.slots}
    for number in range(WARM):
        run.run_round(number)
        plain.apply(anchor, slots, gradient(number), OuterStep(number, matrix_spans=((0, 500),)))
        assert torch.allclose(run.anchor, anchor, atol=1e-5)
        assert torch.allclose(run.slots["second_moment"], slots["second_moment"], rtol=1e-3, atol=1e-6)


def test_after_warm_rounds_second_moment_is_frozen_and_momentum_is_the_merged_one() -> None:
    run = FrozenAdamRun(FrozenAdam(warm_rounds=WARM))
    for number in range(ROUNDS):
        before = run.slots["second_moment"].clone()
        run.run_round(number)
        assert torch.equal(run.slots["second_moment"], before) == (number >= WARM)
    scales = run.slots["first_moment"].abs().view(-1, 1024)
    assert torch.equal(scales, scales[:, :1].expand(-1, 1024)), "one bit a value"


def test_constant_gradient_moves_by_the_rate_in_every_step() -> None:
    """Both moments' zero start is corrected, in warm and frozen rounds, by the rounds that each has learned from."""
    update = FrozenAdam(warm_rounds=WARM, weight_decay=0.0)
    anchor, slots = torch.zeros(4), {name: torch.zeros(4) for name in update.slots}
    steady, momentum = torch.tensor([1.0, -0.01, 30.0, -2.0]), torch.zeros(4)
    for number in range(ROUNDS):
        momentum = 0.9 * momentum + 0.1 * steady
        update.apply(anchor, slots, momentum, OuterStep(number))
        assert torch.allclose(anchor, -0.003 * (number + 1) * steady.sign(), rtol=1e-3)


def test_second_moment_that_learned_from_signs_would_be_far_off() -> None:
    """Negative control of the two phases: a gradient recovered from one-bit momenta is mostly rounding error."""
    run, still_warm = FrozenAdamRun(FrozenAdam(warm_rounds=WARM)), FrozenAdamRun(FrozenAdam(warm_rounds=ROUNDS))
    for number in range(ROUNDS):
        run.run_round(number)
        still_warm.run_round(number)
    small = slice(QUIET, 3 * QUIET)
    true = torch.stack([gradient(number) for number in range(ROUNDS)]).square().mean(0)[small].mean()
    corrected = [
        float(one.slots["second_moment"][small].mean() / (1 - 0.95**rounds) / true)
        for one, rounds in ((run, WARM), (still_warm, ROUNDS))
    ]
    assert corrected[0] == pytest.approx(1, abs=0.2) and corrected[1] > 3


@pytest.mark.parametrize("floor", [0.0, 0.01])
def test_weights_without_gradients_hardly_move(floor: float) -> None:
    run = FrozenAdamRun(FrozenAdam(warm_rounds=WARM, floor=floor, weight_decay=0.0))
    for number in range(ROUNDS):
        run.run_round(number)
    most = 0.003 * ROUNDS * (1 if floor == 0 else 15)
    moved = (run.anchor - 1).abs()[:QUIET]
    assert float(moved.max()) <= most
    scale = float(run.slots["first_moment"][0].abs())
    assert scale * 0.003 / 1e-8 > 1000, "divided by eps alone, one bit would move them far away"


def test_floor_raises_small_second_moments() -> None:
    run = FrozenAdamRun(FrozenAdam(warm_rounds=WARM, floor=0.01))
    for number in range(WARM):
        run.run_round(number)
    before = run.slots["second_moment"].clone()
    run.run_round(WARM)
    after = run.slots["second_moment"]
    assert float(after.min()) == pytest.approx(0.01 * float(before.mean()), rel=1e-4)
    assert torch.equal(after[before > after.min()], before[before > after.min()])

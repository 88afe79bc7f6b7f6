"""Contributions that miss their round, on a loss that each round reduces by a fixed fraction along every direction.

The loss is a sum of squares: along a direction with fraction c, a peer that starts at x ends at (1 - c) x, so its
progress is c x. By the time a late contribution arrives, others have made its progress along directions with a large c,
and momentum repeats it. The gradients have no noise, which rounds of few members would have more of, so every round is
a whole step (for scaled steps see optim.aggregation.step_scaling).
"""

import random

import pytest
import torch

from optim.codecs.base import Payload
from tests.optim.fake_peers import LOSSLESS, NUMEL, FakePeer, Tables, encode, make_planner

PEERS, ROUNDS = 8, 40
FRACTIONS = torch.linspace(0.05, 1, NUMEL)
WHOLE: Tables = {"update": {"shorten": False}}
UNDISCOUNTED: Tables = {"aggregate": {"staleness": 0.0}}
RETRAINED: Tables = {"adoption": {"unsent": 0.0}}


def make_replica(tables: Tables) -> FakePeer:
    replica = FakePeer(make_planner("diloco", LOSSLESS | WHOLE | tables))
    replica.anchor = torch.ones(NUMEL)
    return replica


def errors_with_late_contributions(tables: Tables, late_fraction: float, seed: int) -> list[float]:
    """Return the error after each round when that fraction of contributions is one round late.

    The error is the root mean square, 1 at first.
    """
    replica, draw, errors = make_replica(tables), random.Random(seed), []
    late: list[list[Payload]] = []
    for number in range(ROUNDS):
        rule = replica.planner.plan(number).method.aggregate
        contributions = [(parts, rule.weigh(100, 1)) for parts in late]
        late = []
        for _ in range(PEERS):
            parts = encode(replica.encoder, number, FRACTIONS * replica.anchor, replica.residual)
            if draw.random() < late_fraction:
                late.append(parts)
            else:
                contributions.append((parts, rule.weigh(100, 0)))
        if contributions:
            replica.apply(number, [parts for parts, _ in contributions], [weight for _, weight in contributions])
        errors.append(float(replica.anchor.square().mean().sqrt()))
    return errors


def errors_with_restored_contributions(tables: Tables, late_fraction: float, seed: int) -> list[float]:
    """Return the same errors when contributions that miss their round go back into their sender's residual."""
    replica, draw, errors = make_replica(tables), random.Random(seed), []
    unsent = replica.planner.method.adoption.unsent
    residuals = [torch.zeros(NUMEL) for _ in range(PEERS)]
    for number in range(ROUNDS):
        contributions = []
        for residual in residuals:
            progress = FRACTIONS * (replica.anchor - unsent * residual)
            if draw.random() < late_fraction:
                residual += progress
            else:
                contributions.append(encode(replica.encoder, number, progress, residual))
        if contributions:
            replica.apply(number, contributions, [1.0] * len(contributions))
        errors.append(float(replica.anchor.square().mean().sqrt()))
    return errors


@pytest.mark.parametrize("seed", range(2))
def test_momentum_converges_when_half_of_the_contributions_are_late(seed: int) -> None:
    """Without a discount the anchor oscillates, and the error is several times larger at the end."""
    on_time, late = errors_with_late_contributions({}, 0.0, seed), errors_with_late_contributions({}, 0.5, seed)
    naive = errors_with_late_contributions(UNDISCOUNTED, 0.5, seed)
    assert late[-1] < 1.5 * on_time[-1] < 4 * on_time[-1] < naive[-1], (
        f"seed {seed}: {on_time[-1]} {late[-1]} {naive[-1]}"
    )
    assert max(late) < 1.1 * max(on_time) < max(naive)


@pytest.mark.parametrize("seed", range(2))
def test_peers_train_on_from_restored_contributions(seed: int) -> None:
    """A peer that starts each round at the anchor itself would correct the same errors twice."""
    late, naive = (errors_with_restored_contributions(tables, 0.5, seed) for tables in ({}, RETRAINED))
    assert max(late) < 0.5 and 5 * late[-1] < naive[-1], f"seed {seed}: {late[-1]} {naive[-1]}"

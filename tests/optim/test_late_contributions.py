"""Messages that miss their round, where each round takes a peer a fixed part of the way along every direction.

The loss is a sum of squares: along a direction with part c a peer that starts at x ends at (1 - c) x, so its progress
is c x. What a late message says about directions with a large c has been said by then, and momentum repeats it. There
is no noise here that a round of few would have more of, so every round is a whole step
(optim.aggregation.step_scaling has the others).
"""

import random

import pytest
import torch

from optim.codecs.base import Payload
from tests.optim.fake_peers import LOSSLESS, NUMEL, FakePeer, Tables, make_planner

PEERS, ROUNDS = 8, 40
PART = torch.linspace(0.05, 1, NUMEL)
WHOLE: Tables = {"update": {"shorten": False}}
UNDISCOUNTED: Tables = {"aggregate": {"staleness": 0.0}}
RETRAINED: Tables = {"adoption": {"unsent": 0.0}}


def swarm(tables: Tables) -> FakePeer:
    replica = FakePeer(make_planner("diloco", LOSSLESS | WHOLE | tables))
    replica.anchor = torch.ones(NUMEL)
    return replica


def with_late_messages(tables: Tables, share: float, seed: int) -> list[float]:
    """The error (root mean square, 1 at first) after each round, where that share of all messages is a round late."""
    replica, draw, errors = swarm(tables), random.Random(seed), []
    late: list[list[Payload]] = []
    for number in range(ROUNDS):
        rule = replica.planner.plan(number).method.aggregate
        messages = [(parts, rule.weigh(100, 1)) for parts in late]
        late = []
        for _ in range(PEERS):
            parts = replica.encoder.encode(number, PART * replica.anchor, replica.residual)
            if draw.random() < share:
                late.append(parts)
            else:
                messages.append((parts, rule.weigh(100, 0)))
        if messages:
            replica.apply(number, [parts for parts, _ in messages], [weight for _, weight in messages])
        errors.append(float(replica.anchor.square().mean().sqrt()))
    return errors


def with_messages_given_back(tables: Tables, share: float, seed: int) -> list[float]:
    """The same where what misses its round goes back into its sender's residual."""
    replica, draw, errors = swarm(tables), random.Random(seed), []
    unsent = replica.planner.method.adoption.unsent
    residuals = [torch.zeros(NUMEL) for _ in range(PEERS)]
    for number in range(ROUNDS):
        messages = []
        for residual in residuals:
            progress = PART * (replica.anchor - unsent * residual)
            if draw.random() < share:
                residual += progress
            else:
                messages.append(replica.encoder.encode(number, progress, residual))
        if messages:
            replica.apply(number, messages, [1.0] * len(messages))
        errors.append(float(replica.anchor.square().mean().sqrt()))
    return errors


@pytest.mark.parametrize("seed", range(2))
def test_half_of_all_messages_may_be_late_under_momentum(seed: int) -> None:
    """Counted fully they make the anchor swing: the error is several times larger at the end."""
    calm, rowed = with_late_messages({}, 0.0, seed), with_late_messages({}, 0.5, seed)
    naive = with_late_messages(UNDISCOUNTED, 0.5, seed)
    assert rowed[-1] < 1.5 * calm[-1] < 4 * calm[-1] < naive[-1], f"seed {seed}: {calm[-1]} {rowed[-1]} {naive[-1]}"
    assert max(rowed) < 1.1 * max(calm) < max(naive)


@pytest.mark.parametrize("seed", range(2))
def test_what_was_given_back_is_trained_on_from(seed: int) -> None:
    """A peer that begins each round at the anchor itself corrects the same errors once more."""
    rowed, naive = (with_messages_given_back(tables, 0.5, seed) for tables in ({}, RETRAINED))
    assert max(rowed) < 0.5 and 5 * rowed[-1] < naive[-1], f"seed {seed}: {rowed[-1]} {naive[-1]}"

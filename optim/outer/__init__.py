"""Outer optimizers: how the anchor that all peers share moves by the result of a round."""

from optim.outer.adaptive import Adam, FrozenAdam, Sign
from optim.outer.base import OuterOptimizer, OuterStep, Slots
from optim.outer.gossip import Gossip, GossipWeights, Replace, consensus_factor
from optim.outer.momentum import DelayedNesterov, HeavyBall, Nesterov, Sgd, StalenessPenalised

__all__ = [
    "Adam",
    "DelayedNesterov",
    "FrozenAdam",
    "Gossip",
    "GossipWeights",
    "HeavyBall",
    "OuterStep",
    "Nesterov",
    "Replace",
    "Sgd",
    "Sign",
    "Slots",
    "StalenessPenalised",
    "OuterOptimizer",
    "consensus_factor",
]

"""How the anchor, which all peers hold alike, moves by what a round came to."""

from optim.updates.adaptive import Adam, FrozenAdam, Sign
from optim.updates.gossip import Gossip, GossipWeights, Replace, consensus_factor
from optim.updates.momentum import DelayedNesterov, HeavyBall, Nesterov, Sgd, StalenessPenalised
from optim.updates.update import OuterStep, Slots, OuterOptimizer

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

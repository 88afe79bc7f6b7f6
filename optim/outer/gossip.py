"""Outer optimizers for peers that each have an anchor of their own and meet in groups."""

from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.options import STRICT
from optim.outer.base import OuterOptimizer, OuterStep, Slots, tensor_slabs


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Gossip(OuterOptimizer):
    """NoLoCo's step (arXiv 2506.10911) in a group whose members have anchors of their own.

    With the mean progress delta (uphill) and the mean anchor of the group:

        d <- alpha * d - beta * mean(delta) - gamma * (phi - mean(phi));  phi <- phi + d

    For the signal "progress-and-anchor". Only stable pairs (alpha, gamma) are accepted, see `consensus_factor`. (The
    public code has only gamma = beta = 0.7, for which the two means are one: then `gossip-weights` needs half the
    bytes.)
    """

    kind: ClassVar[str] = "gossip"
    slots: ClassVar[tuple[str, ...]] = ("momentum",)
    signals: ClassVar[tuple[str, ...]] = ("progress-and-anchor",)

    alpha: float = Field(default=0.5, ge=0, lt=1)
    beta: float = Field(default=0.7, gt=0, le=10)
    gamma: float = Field(default=0.7, ge=0, le=10)

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, outer_step: OuterStep) -> None:
        progress, mean = delta[: anchor.numel()], delta[anchor.numel() :]
        for part in tensor_slabs(anchor):
            momentum = slots["momentum"][part]
            momentum *= self.alpha
            momentum -= progress[part] * self.beta
            momentum -= (anchor[part] - mean[part]) * self.gamma
            anchor[part] += momentum


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GossipWeights(OuterOptimizer):
    """NoLoCo's step (arXiv 2506.10911) with gamma = beta, for which a member need only send its weights theta.

        d <- alpha * d - beta * (phi - mean(theta));  phi <- phi + d

    For the signal "weights".
    """

    kind: ClassVar[str] = "gossip-weights"
    is_elementwise: ClassVar[bool] = True
    slots: ClassVar[tuple[str, ...]] = ("momentum",)
    signals: ClassVar[tuple[str, ...]] = ("weights",)

    alpha: float = Field(default=0.5, ge=0, lt=1)
    beta: float = Field(default=0.7, gt=0, le=10)

    @property
    def gamma(self) -> float:
        return self.beta

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, outer_step: OuterStep) -> None:
        for part in tensor_slabs(anchor):
            momentum = slots["momentum"][part]
            momentum *= self.alpha
            momentum -= (anchor[part] - delta[part]) * self.beta
            anchor[part] += momentum


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Replace(OuterOptimizer):
    """phi <- the merged vector: for the signal "weights" (gossip averaging, arXiv 2410.11998)."""

    kind: ClassVar[str] = "replace"
    is_elementwise: ClassVar[bool] = True
    signals: ClassVar[tuple[str, ...]] = ("weights",)

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, outer_step: OuterStep) -> None:
        anchor.copy_(delta)


def consensus_factor(alpha: float, gamma: float, size: int) -> float:
    """Return the factor by which the variance between anchors changes per round without progress.

    It holds for many peers in random groups of `size`: below 1 the anchors converge, above 1 they diverge. It is the
    largest eigenvalue of the recursion of the second moments, where s = 1 - 1 / size is the part of a member's
    deviation that is missing from the mean of its group:

        d' = alpha * d - gamma * (phi - mean(phi));  phi' = phi + d'
        E d'^2     = gamma^2 s E phi^2 - 2 alpha gamma s E phi d + alpha^2 E d^2
        E phi d'   = alpha E phi d - gamma s E phi^2
        E phi'^2   = E phi^2 + 2 E phi d' + E d'^2;    E phi' d' = E phi d' + E d'^2
    """
    own = 1 - 1 / size
    square = np.array([gamma**2 * own, -2 * alpha * gamma * own, alpha**2])
    cross = np.array([-gamma * own, alpha, 0])
    recursion = np.array([np.array([1, 0, 0]) + 2 * cross + square, cross + square, square])
    return float(np.abs(np.linalg.eigvals(recursion)).max())

"""Outer optimizers: the step that all peers apply to the anchor after a round.

    momentum    merged progress is a gradient: without momentum, with it, and with it for late progress
    adaptive    they replace the inner optimizer: their rate is a learning rate and decays with the run's
    gossip      peers have anchors of their own and meet in groups

Each peer applies the same step and must hold the same bits afterwards. Therefore each line is one elementwise operation
with one rounding: a fused `add(x, alpha=...)` is a fused multiply-add on some processors and not on others, and at the
ends of a vector not even on those.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass as plain_dataclass
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.kernels.vectors import norm, slabs
from optim.layout import Span
from optim.options import STRICT

EPSILON = 1e-8

Slots = Mapping[str, torch.Tensor]


@plain_dataclass(frozen=True)
class OuterStep:
    """The position of an outer step in the run.

    `count` is the number of earlier steps on the same values, `local_steps` the local steps of a peer before this
    round. `rate_decay` is the fraction of the run's learning rate left at that point, for optimizers that replace the
    inner one. Only `matrix_spans` are subject to weight decay.
    """

    count: int = 0
    local_steps: int = 0
    rate_decay: float = 1.0
    matrix_spans: tuple[Span, ...] = ()


class OuterOptimizer(ABC):
    """The rule by which the anchor moves after a round.

    `slots` names its state vectors: flat fp32 of the model's size, zero at the start. `signals` lists the kinds of
    signal that it accepts.
    """

    kind: ClassVar[str]
    slots: ClassVar[tuple[str, ...]] = ()
    positive_slots: ClassVar[tuple[str, ...]] = ()  # those that are never below zero
    signals: ClassVar[tuple[str, ...]] = ("pseudo-gradient", "gradient", "inner-state")
    counts_steps: ClassVar[bool] = False  # needs the number of earlier steps on the same values
    is_elementwise: ClassVar[bool] = False  # slabs may be stepped in any order, and in parallel

    @property
    def is_scaled_by_weight(self) -> bool:
        """Return whether a round of less weight than usual takes a smaller step (optim.aggregation.step_scaling)."""
        return False

    @abstractmethod
    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, outer_step: OuterStep) -> None:
        """Update `anchor` and `slots` in place. All are flat fp32 tensors of one size on the CPU."""

    @property
    def linear_rate(self) -> float | None:
        """Return the rate if the whole step is phi <- phi - rate * delta, else None."""
        return None


def tensor_slabs(vector: torch.Tensor) -> Iterator[slice]:
    return slabs(vector.numel())


def tensor_norm(vector: torch.Tensor) -> float:
    """Return the Euclidean norm, the same on every machine."""
    return norm([vector.numpy()])


def decay_weights(anchor: torch.Tensor, outer_step: OuterStep, fraction: float) -> None:
    """Apply phi <- phi * (1 - fraction) to matrices only."""
    for start, stop in outer_step.matrix_spans:
        anchor[start:stop] *= 1 - fraction


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _ScalableOptimizer(OuterOptimizer):
    """An optimizer that can scale its step by the weight of the round (optim.aggregation.step_scaling)."""

    is_elementwise: ClassVar[bool] = True

    shorten: bool = Field(default=False, description="scale the step of a round of less weight than usual")

    @property
    def is_scaled_by_weight(self) -> bool:
        return self.shorten


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sgd(_ScalableOptimizer):
    """phi <- phi - eta * delta. With eta = 1 and a mean this is plain parameter averaging (arXiv 1602.05629)."""

    kind: ClassVar[str] = "sgd"

    learning_rate: float = Field(default=1.0, gt=0, le=10)

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, outer_step: OuterStep) -> None:
        for part in tensor_slabs(anchor):
            anchor[part] -= delta[part] * self.learning_rate

    @property
    def linear_rate(self) -> float:
        return self.learning_rate


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _MomentumOptimizer(_ScalableOptimizer):
    """m <- mu * m + delta; subclasses compute the step from m and delta."""

    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    learning_rate: float = Field(default=0.7, gt=0, le=10)
    momentum: float = Field(default=0.9, ge=0, lt=1)

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, outer_step: OuterStep) -> None:
        for part in tensor_slabs(anchor):
            momentum = slots["momentum"][part]
            momentum *= self.momentum
            momentum += delta[part]
            step = self._step(momentum, delta[part])
            step *= self.learning_rate
            anchor[part] -= step

    @abstractmethod
    def _step(self, momentum: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Return the step before it is scaled by eta, as a new tensor."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Nesterov(_MomentumOptimizer):
    """Nesterov's momentum as in torch.optim.SGD(nesterov=True), the outer optimizer of DiLoCo (arXiv 2311.08105).

    m <- mu * m + delta;  phi <- phi - eta * (delta + mu * m)
    """

    kind: ClassVar[str] = "nesterov"

    def _step(self, momentum: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        step = momentum * self.momentum
        step += delta
        return step


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HeavyBall(_MomentumOptimizer):
    """Polyak's momentum as in torch.optim.SGD(nesterov=False).

    m <- mu * m + delta;  phi <- phi - eta * m
    """

    kind: ClassVar[str] = "heavy-ball"

    def _step(self, momentum: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        return momentum.clone()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DelayedNesterov(OuterOptimizer):
    """Nesterov's momentum for progress that arrives from a few members at a time (arXiv 2401.09135, with its c = 0).

    Momentum diverges when it is applied to every stale update, so it is applied only to every N-th, N = `period`, using
    the mean of the last N:

        every N-th update:  m <- mu * m + (sum of the N) / N;  phi <- phi - eta * (delta / N + mu * m)
        the others:         phi <- phi - eta * delta / N

    N such updates equal one Nesterov step on their mean. (The paper's public notebook has a different rule.)
    """

    kind: ClassVar[str] = "delayed-nesterov"
    counts_steps: ClassVar[bool] = True
    is_elementwise: ClassVar[bool] = True
    slots: ClassVar[tuple[str, ...]] = ("gathered", "momentum")

    learning_rate: float = Field(default=0.7, gt=0, le=10)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    period: int = Field(default=4, ge=1, le=1000)

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, outer_step: OuterStep) -> None:
        is_period_end = (outer_step.count + 1) % self.period == 0
        for part in tensor_slabs(anchor):
            gathered, step = slots["gathered"][part], delta[part] / self.period
            gathered += delta[part]
            if is_period_end:
                momentum = slots["momentum"][part]
                momentum *= self.momentum
                momentum += gathered / self.period
                gathered.zero_()
                step += momentum * self.momentum
            step *= self.learning_rate
            anchor[part] -= step


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StalenessPenalised(OuterOptimizer):
    """CO2's outer step on progress that is one round late (arXiv 2401.16265).

        m <- mu * m + delta / L;  m <- clamp(m, -c', c');  phi <- phi - eta * m
        L = 1 + |x_t - x_(t-1)| / |a|,  a = the running mean of |x_t - x_(t-1)| by coordinate

    where c' is `clip` times the remaining fraction of the run's learning rate, because progress shrinks with it.

    The gap x_t - x_(t-1) = -eta * m is the movement of the anchor since the progress was measured from it. The paper
    leaves open how the gap is scaled; here all peers know `a`, an average over the first rounds and later over about
    the last 1 / `rate`. (In the public code the clip has no effect and L is a constant, 1 by default: `penalty` =
    false.)
    """

    kind: ClassVar[str] = "staleness-penalised"
    counts_steps: ClassVar[bool] = True
    slots: ClassVar[tuple[str, ...]] = ("momentum", "movement")
    positive_slots: ClassVar[tuple[str, ...]] = ("movement",)

    learning_rate: float = Field(default=1.0, gt=0, le=10)
    momentum: float = Field(default=0.5, ge=0, lt=1)
    clip: float = Field(default=0.1, gt=0, description="bound of m in every coordinate")
    penalty: bool = True
    rate: float = Field(default=0.1, gt=0, le=1, description="rate of the running mean")

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, outer_step: OuterStep) -> None:
        penalty = self._update_penalty(slots, outer_step) if self.penalty else 1.0
        limit = self.clip * outer_step.rate_decay
        for part in tensor_slabs(anchor):
            momentum = slots["momentum"][part]
            momentum *= self.momentum
            momentum += delta[part] / penalty
            momentum.clamp_(-limit, limit)
            anchor[part] -= momentum * self.learning_rate

    def _update_penalty(self, slots: Slots, outer_step: OuterStep) -> float:
        """Update `a` and return L, both in units of eta."""
        momentum, movement = slots["momentum"], slots["movement"]
        weight = max(self.rate, 1 / max(1, outer_step.count))
        for part in tensor_slabs(momentum):
            movement[part] += (momentum[part].abs() - movement[part]) * weight
        mean = tensor_norm(movement)
        return 1 + tensor_norm(momentum) / mean if mean else 1.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sign(OuterOptimizer):
    """Sign descent (arXiv 1802.04434; DeMo, arXiv 2411.19870).

        phi <- phi * (1 - eta' * weight_decay)      matrices only
        phi <- phi - eta' * sign(delta),            sign(0) = 0

    where eta' is eta times the remaining fraction of the run's learning rate. Each weight moves by eta' or not at all,
    whatever the size of delta, so eta belongs near an inner learning rate.
    """

    kind: ClassVar[str] = "sign"

    learning_rate: float = Field(default=0.001, gt=0, le=10)
    weight_decay: float = Field(default=0.0, ge=0, le=1)

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, outer_step: OuterStep) -> None:
        rate = self.learning_rate * outer_step.rate_decay
        decay_weights(anchor, outer_step, rate * self.weight_decay)
        for part in tensor_slabs(anchor):
            anchor[part] -= torch.sign(delta[part]) * rate


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Adam(OuterOptimizer):
    """AdamW (arXiv 1711.05101) on the merged gradient; used after every step it is data-parallel training.

        g <- delta * min(1, clip / |delta|)
        m <- beta1 * m + (1 - beta1) * g;  v <- beta2 * v + (1 - beta2) * g^2
        phi <- phi * (1 - eta' * weight_decay)      matrices only
        phi <- phi - eta' * m' / (sqrt(v') + eps)

    where x' = x / (1 - beta^(round + 1)) and eta' is eta times the remaining fraction of the run's learning rate.
    """

    kind: ClassVar[str] = "adam"
    counts_steps: ClassVar[bool] = True
    slots: ClassVar[tuple[str, ...]] = ("first_moment", "second_moment")
    positive_slots: ClassVar[tuple[str, ...]] = ("second_moment",)

    learning_rate: float = Field(default=0.003, gt=0, le=10)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.1, ge=0, le=1)
    clip: float = Field(default=1.0, gt=0)

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, outer_step: OuterStep) -> None:
        rate, count = self.learning_rate * outer_step.rate_decay, outer_step.count + 1
        size = tensor_norm(delta)
        shrink = min(1.0, self.clip / size) if size else 1.0
        decay_weights(anchor, outer_step, rate * self.weight_decay)
        scale = math.sqrt(1 - self.beta2**count)
        for part in tensor_slabs(anchor):
            first, second, gradient = slots["first_moment"][part], slots["second_moment"][part], delta[part] * shrink
            first *= self.beta1
            first += gradient * (1 - self.beta1)
            second *= self.beta2
            second += gradient * gradient * (1 - self.beta2)
            spread = torch.sqrt(second)
            spread /= scale
            spread += EPSILON
            anchor[part] -= first / spread * (rate / (1 - self.beta1**count))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FrozenAdam(OuterOptimizer):
    """1-bit Adam (arXiv 2102.02888): the merged contribution is the momentum m' itself.

    In the first `warm_rounds` rounds this is Adam, which recovers the mean gradient from m' to learn v. Afterwards v is
    frozen, so that m' may be sent as one bit per value.

        g = (m' - beta1 * m) / (1 - beta1);  v <- beta2 * v + (1 - beta2) * g^2        while warm
        phi <- phi * (1 - eta' * weight_decay)                                         matrices only
        m <- m';  phi <- phi - eta' * (m / (1 - beta1^n)) / (sqrt(v / (1 - beta2^w)) + eps)

    where n = round + 1, w = min(n, warm_rounds) and eta' is eta times the remaining fraction of the run's learning
    rate.

    A weight that never had a gradient (v = 0) does not move: one bit decodes to at least the scale of its block, and
    divided by eps that would be a huge step. For weights that hardly had any gradient, v is raised to `floor` * mean(v)
    when it freezes (0 in the paper).
    """

    kind: ClassVar[str] = "frozen-adam"
    counts_steps: ClassVar[bool] = True
    slots: ClassVar[tuple[str, ...]] = ("first_moment", "second_moment")
    positive_slots: ClassVar[tuple[str, ...]] = ("second_moment",)
    signals: ClassVar[tuple[str, ...]] = ("momentum",)

    learning_rate: float = Field(default=0.003, gt=0, le=10)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.1, ge=0, le=1)
    warm_rounds: int = Field(default=100, ge=1)
    floor: float = Field(default=0.0, ge=0, le=1)

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, outer_step: OuterStep) -> None:
        rate, count = self.learning_rate * outer_step.rate_decay, outer_step.count + 1
        decay_weights(anchor, outer_step, rate * self.weight_decay)
        if outer_step.count == self.warm_rounds:
            self._raise_to_floor(slots["second_moment"])
        scale = math.sqrt(1 - self.beta2 ** min(count, self.warm_rounds))
        for part in tensor_slabs(anchor):
            first, second = slots["first_moment"][part], slots["second_moment"][part]
            if outer_step.count < self.warm_rounds:
                self._update_second_moment(first, second, delta[part])
            first.copy_(delta[part])
            spread = torch.sqrt(second)
            spread /= scale
            spread += EPSILON
            step = first / spread * (rate / (1 - self.beta1**count))
            anchor[part] -= torch.where(second > 0, step, 0.0)

    def _update_second_moment(self, first: torch.Tensor, second: torch.Tensor, merged: torch.Tensor) -> None:
        gradient = merged - first * self.beta1
        gradient /= 1 - self.beta1
        second *= self.beta2
        second += gradient * gradient * (1 - self.beta2)

    def _raise_to_floor(self, second: torch.Tensor) -> None:
        mean = tensor_norm(torch.sqrt(second)) ** 2 / second.numel()
        second.clamp_(min=self.floor * mean)


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

"""What is exchanged.

A peer's own vectors are its weights and those that its inner optimizer keeps. Of these, a signal `shares` some: their
agreed values (the anchor and its companions) are the same on all peers. A message is `width` vectors of the model's
size one after the other, or the spans of them that the schedule picks.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass as plain_dataclass
from typing import ClassVar

import torch
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from optim.errors import UnknownOption
from optim.exchange_schedule import Schedule
from optim.inner.base import FIRST_MOMENT, GRADIENT_SUM, SECOND_MOMENT, WEIGHTS
from optim.layout import Layout, Span
from optim.options import STRICT

MAX_PERIOD = 1000  # rounds


@plain_dataclass(frozen=True)
class SignalInputs:
    """What a peer measures its message from, flat fp32 on the CPU. `live`, `reference` (where its last message left
    off) and `agreed` go by the names of shared vectors, `own` by those of the inner state that the signal consumes.
    """

    live: Mapping[str, torch.Tensor]
    reference: Mapping[str, torch.Tensor]
    anchor: Mapping[str, torch.Tensor]
    inner_state: Mapping[str, torch.Tensor]
    steps: int  # since the last message


class Signal(ABC):
    kind: ClassVar[str]
    shared_names: ClassVar[tuple[str, ...]] = (WEIGHTS,)
    averaged_names: ClassVar[tuple[str, ...]] = ()  # of the shared ones, those that no update moves: they are averaged
    consumed_names: ClassVar[tuple[str, ...]] = ()  # vectors of the inner optimizer that begin anew after a message
    is_delta: ClassVar[bool] = True  # what missed its round may be sent later
    requires_whole: ClassVar[bool] = False  # not to be sent in fragments
    vector_count: ClassVar[int] = 1

    @property
    def period(self) -> int:
        """After so many rounds the same vectors are sent again."""
        return 1

    @abstractmethod
    def measure(self, inputs: SignalInputs) -> torch.Tensor:
        """A new vector of `width` times the model's size, pointing uphill."""

    def spans(self, round_number: int, layout: Layout, schedule: Schedule) -> tuple[Span, ...]:
        """What is sent of the measured vector, whose `width` vectors have that layout each."""
        if self.requires_whole and schedule.fragments > 1:
            raise UnknownOption(f"signal {self.kind!r} is sent whole; set schedule.fragments = 1")
        return schedule.spans(round_number, layout.repeat(self.vector_count))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PseudoGradient(Signal):
    """How far the weights moved since the last message, pointing uphill as a gradient does (arXiv 2311.08105):

    delta = reference - weights

    With `equal_steps` = S above 0, times S / steps: as if every peer had made S steps, each as its own on average,
    so that who made more does not pull harder (anarchic averaging, arXiv 2108.09875).
    """

    kind: ClassVar[str] = "pseudo-gradient"

    equal_steps: int = Field(default=0, ge=0, le=100_000)

    def measure(self, inputs: SignalInputs) -> torch.Tensor:
        delta = inputs.reference[WEIGHTS] - inputs.live[WEIGHTS]
        if self.equal_steps:
            delta *= self.equal_steps / max(1, inputs.steps)
        return delta


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WeightsAndMoments(Signal):
    """Weights and both of Adam's moments, each averaged on its own period (Local Adam; DES-LOC, arXiv 2505.22549):
    the weights in every round, the first moment in every `first_every`-th, the second in every `second_every`-th.

    delta_x = reference_x - x for each of the three
    """

    kind: ClassVar[str] = "inner-state"
    shared_names: ClassVar[tuple[str, ...]] = (WEIGHTS, FIRST_MOMENT, SECOND_MOMENT)
    averaged_names: ClassVar[tuple[str, ...]] = (FIRST_MOMENT, SECOND_MOMENT)
    requires_whole: ClassVar[bool] = True
    vector_count: ClassVar[int] = 3

    first_every: int = Field(default=3, ge=1, le=MAX_PERIOD)
    second_every: int = Field(default=6, ge=1, le=MAX_PERIOD)

    @model_validator(mode="after")
    def _check_common_period(self) -> "WeightsAndMoments":
        if self.period > MAX_PERIOD:
            raise ValueError(f"both periods must meet within {MAX_PERIOD} rounds; let one be a multiple of the other")
        return self

    @property
    def period(self) -> int:
        return math.lcm(self.first_every, self.second_every)

    def measure(self, inputs: SignalInputs) -> torch.Tensor:
        return torch.cat([inputs.reference[name] - inputs.live[name] for name in self.shared_names])

    def spans(self, round_number: int, layout: Layout, schedule: Schedule) -> tuple[Span, ...]:
        super().spans(round_number, layout, schedule)
        periods = (1, self.first_every, self.second_every)
        sent = [place for place, period in enumerate(periods) if (round_number + 1) % period == 0]
        return tuple((place * layout.numel, (place + 1) * layout.numel) for place in sent)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Gradient(Signal):
    """The mean gradient of the steps since the last message; the weights only move with the anchor. For an inner
    optimizer that gathers gradients.

    g = (sum of gradients) / steps
    """

    kind: ClassVar[str] = "gradient"
    consumed_names: ClassVar[tuple[str, ...]] = (GRADIENT_SUM,)
    requires_whole: ClassVar[bool] = True

    def measure(self, inputs: SignalInputs) -> torch.Tensor:
        return inputs.inner_state[GRADIENT_SUM] / max(1, inputs.steps)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Momentum(Signal):
    """The agreed momentum moved on by the own gradient (1-bit Adam, arXiv 2102.02888):

    m_i = beta * m + (1 - beta) * g_i
    """

    kind: ClassVar[str] = "momentum"
    shared_names: ClassVar[tuple[str, ...]] = (WEIGHTS, FIRST_MOMENT)
    consumed_names: ClassVar[tuple[str, ...]] = (GRADIENT_SUM,)
    is_delta: ClassVar[bool] = False
    requires_whole: ClassVar[bool] = True

    beta: float = Field(default=0.9, ge=0, lt=1)

    def measure(self, inputs: SignalInputs) -> torch.Tensor:
        gradient = inputs.inner_state[GRADIENT_SUM] / max(1, inputs.steps)
        return inputs.anchor[FIRST_MOMENT] * self.beta + gradient * (1 - self.beta)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Weights(Signal):
    """The weights themselves, for exchanges in pairs whose anchors differ (arXiv 2410.11998)."""

    kind: ClassVar[str] = "weights"
    is_delta: ClassVar[bool] = False

    def measure(self, inputs: SignalInputs) -> torch.Tensor:
        return inputs.live[WEIGHTS].clone()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PseudoGradientAndAnchor(Signal):
    """The pseudo-gradient, and the anchor that it was measured from (NoLoCo, arXiv 2506.10911, with its consensus
    strength apart from its step): delta_i and phi_i, one after the other."""

    kind: ClassVar[str] = "progress-and-anchor"
    is_delta: ClassVar[bool] = False
    requires_whole: ClassVar[bool] = True
    vector_count: ClassVar[int] = 2

    def measure(self, inputs: SignalInputs) -> torch.Tensor:
        return torch.cat([inputs.reference[WEIGHTS] - inputs.live[WEIGHTS], inputs.anchor[WEIGHTS]])

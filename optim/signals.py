"""Signals: the vectors that peers exchange.

A peer's own vectors are its weights and the state of its inner optimizer. A signal shares some of them: their agreed
values, the anchor and its companions, are the same on all peers. A contribution consists of `vector_count` vectors of
the model's size, one after the other, or of the spans of them that the schedule selects.
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
from optim.inner.base import FIRST_MOMENT, GRADIENT_SUM, SECOND_MOMENT, WEIGHTS
from optim.layout import Layout, Span
from optim.options import STRICT
from optim.schedules.exchange_schedule import Schedule

MAX_PERIOD = 1000  # rounds


@plain_dataclass(frozen=True)
class SignalInputs:
    """The vectors from which a peer measures its contribution, flat fp32 on the CPU.

    `live`, `reference` (up to where the last contribution was measured) and `anchor` are keyed by the names of shared
    vectors, `inner_state` by those of the inner optimizer's vectors that the signal consumes.
    """

    live: Mapping[str, torch.Tensor]
    reference: Mapping[str, torch.Tensor]
    anchor: Mapping[str, torch.Tensor]
    inner_state: Mapping[str, torch.Tensor]
    steps: int  # since the last contribution


class Signal(ABC):
    """The kind of vectors that a contribution is made of."""

    kind: ClassVar[str]
    shared_names: ClassVar[tuple[str, ...]] = (WEIGHTS,)
    averaged_names: ClassVar[tuple[str, ...]] = ()  # shared vectors without an outer step
    consumed_names: ClassVar[tuple[str, ...]] = ()  # inner optimizer's vectors, reset after each contribution
    is_delta: ClassVar[bool] = True  # a contribution that missed its round may be sent later
    requires_whole: ClassVar[bool] = False  # cannot be sent in fragments
    counts_steps: ClassVar[bool] = False  # a round may change nothing, so the shared state counts the others
    vector_count: ClassVar[int] = 1

    @property
    def period(self) -> int:
        """Return the number of rounds after which the same vectors are sent again."""
        return 1

    @abstractmethod
    def measure(self, inputs: SignalInputs) -> torch.Tensor:
        """Return a new vector of `vector_count` times the model's size, pointing uphill."""

    def spans(self, round_number: int, layout: Layout, schedule: Schedule) -> tuple[Span, ...]:
        """Return the spans of the measured vector to send, where each of its vectors has this layout.

        Raises:
            UnknownOption: the signal cannot be sent in fragments.
        """
        if self.requires_whole and not schedule.is_whole:
            key = "fragments" if schedule.fragments > 1 else "experts_every"
            raise UnknownOption(f"signal {self.kind!r} is sent whole; set schedule.{key} = 1")
        return schedule.spans(round_number, layout.repeat(self.vector_count))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PseudoGradient(Signal):
    """The movement of the weights since the last contribution, pointing uphill as a gradient does (arXiv 2311.08105).

        delta = reference - weights

    With `equal_steps` = S above 0 it is multiplied by S / steps, as if every peer had made S average steps of its own,
    so that peers with more steps do not pull harder (anarchic averaging, arXiv 2108.09875).
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
    """Weights and both of Adam's moments, each averaged on its own period (Local Adam; DES-LOC, arXiv 2505.22549).

        delta_x = reference_x - x for each of the three

    The weights are sent in every round, the first moment in every `first_every`-th, the second in every
    `second_every`-th.
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
        vectors = [vector for vector, period in enumerate(periods) if (round_number + 1) % period == 0]
        return tuple((vector * layout.numel, (vector + 1) * layout.numel) for vector in vectors)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Gradient(Signal):
    """The mean gradient of the steps since the last contribution; the weights move only with the anchor.

        g = (sum of gradients) / steps

    For an inner optimizer that accumulates gradients.
    """

    kind: ClassVar[str] = "gradient"
    consumed_names: ClassVar[tuple[str, ...]] = (GRADIENT_SUM,)
    requires_whole: ClassVar[bool] = True

    def measure(self, inputs: SignalInputs) -> torch.Tensor:
        return inputs.inner_state[GRADIENT_SUM] / max(1, inputs.steps)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Momentum(Signal):
    """The agreed momentum, updated with the peer's own gradient (1-bit Adam, arXiv 2102.02888).

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
    """The pseudo-gradient followed by the anchor that it was measured from: delta_i and phi_i.

    For NoLoCo (arXiv 2506.10911) with a consensus strength that is independent of its step.
    """

    kind: ClassVar[str] = "progress-and-anchor"
    is_delta: ClassVar[bool] = False
    requires_whole: ClassVar[bool] = True
    vector_count: ClassVar[int] = 2

    def measure(self, inputs: SignalInputs) -> torch.Tensor:
        return torch.cat([inputs.reference[WEIGHTS] - inputs.live[WEIGHTS], inputs.anchor[WEIGHTS]])

"""The method of exact steps: each peer sends the sum of some microbatches' gradients; together they make a step.

Sums are in fp64, where sums of fp32 gradients of like size are exact. So the merged gradient has the same bits
whichever peer computed which microbatch:

    g = fp32(sum of all peers' sums / microbatches of a step) * min(1, clip / |g|)

Nothing of a contribution survives its round: there is no residual, and no peer moves its own weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from optim.aggregation.base import AggregationRule, RoundVerdict, WeightedPayload
from optim.codecs.base import Codec, Payload, PayloadWriter
from optim.errors import CodecError, UnknownOption
from optim.feedback import NoFeedback
from optim.inner.base import InnerStep, InnerUpdateRule
from optim.inner.gradient_accumulation import GradientAccumulator
from optim.kernels.vectors import ArrayVector, Floats, Vector, norm
from optim.method import Method
from optim.options import STRICT
from optim.signals import Gradient, Signal, SignalInputs
from optim.topologies import GatherOptions

Doubles = npt.NDArray[np.float64]
SUM_LIMIT = 2.0**64  # of a value's magnitude: the sum of all peers' stays far below the limit of fp32


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Float64Sum(Codec):
    """fp64, for sums. Payload: header, values; the header alone is a sum of nothing."""

    kind: ClassVar[str] = "fp64-sum"
    number: ClassVar[int] = 13
    version: ClassVar[int] = 1

    def max_bytes(self, numel: int) -> int:
        return 2 + 8 * numel

    def encode_array(self, values: Floats, subtract: bool) -> Payload:
        payload = self.encode_sum(values.astype(np.float64))
        if subtract:
            values[:] = 0
        return payload

    def encode_sum(self, total: Doubles) -> Payload:
        """Encode a sum without rounding. Raises CodecError for a value that is not finite or too large."""
        _check_sum(total)
        writer = PayloadWriter(self.header(), 8 * total.size)
        writer.reserve("f8", total.size)[:] = total
        return writer.payload

    def encode_nothing(self) -> Payload:
        """Encode the sum of no gradient at all."""
        return self.header()

    def decode_sum(self, payload: Payload, numel: int) -> Doubles | None:
        """Return a checked sum; None for that of nothing. Raises CodecError."""
        reader = self.open_payload(payload, numel)
        if not reader.remaining:
            return None
        total: Doubles = reader.read("f8", numel)
        reader.expect_end()
        _check_sum(total)
        return total

    def decode_vector(self, payload: Payload, numel: int) -> Vector:
        total = self.decode_sum(payload, numel)
        return ArrayVector(np.zeros(numel, np.float32) if total is None else total.astype(np.float32))


def _check_sum(total: Doubles) -> None:
    if not (np.abs(total) < SUM_LIMIT).all():
        raise CodecError("a sum of gradients with a value that is not finite or too large")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExactSum(AggregationRule):
    """The mean of `count` gradients, of which each member sends the sum of some; no member is left out.

    Args:
        count: microbatches of a step.
        clip: the largest norm of the mean.
    """

    kind: ClassVar[str] = "exact-sum"

    count: int = Field(ge=1)
    clip: float = Field(gt=0)

    def screen(
        self, payloads: Sequence[WeightedPayload], usual_norm: float = 0.0, state: Floats | None = None
    ) -> RoundVerdict:
        """Let all payloads count: without one of them the step would not be complete."""
        return RoundVerdict(tuple(payloads), (0.0,) * len(payloads), usual_norm=usual_norm)

    def combine(self, payloads: Sequence[WeightedPayload], state: Floats | None = None) -> Floats:
        total: Doubles = np.zeros(payloads[0].numel)
        for member in payloads:
            part = _sum_of(member)
            if part is not None:
                total += part
        mean: Floats = (total / self.count).astype(np.float32)
        size = norm([mean])
        if size > self.clip:
            mean *= np.float32(self.clip / size)
        return mean


def _sum_of(member: WeightedPayload) -> Doubles | None:
    if isinstance(member.payload, Vector):
        return member.payload.to_dense().astype(np.float64)
    if not isinstance(member.codec, Float64Sum):
        raise CodecError("a contribution to an exact step that is not a sum in fp64")
    return member.codec.decode_sum(member.payload, member.numel)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExactGradient(Signal):
    """The sum of the gradients of some microbatches of one step; it counts in its own round only."""

    kind: ClassVar[str] = "exact-gradient"
    is_delta: ClassVar[bool] = False
    requires_whole: ClassVar[bool] = True
    counts_steps: ClassVar[bool] = True

    def measure(self, inputs: SignalInputs) -> Tensor:
        """Return no progress: the trainer sends the sum of its gradients itself."""
        return torch.zeros_like(inputs.live["weights"])


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StillWeights(InnerUpdateRule):
    """Make no step: only the anchor moves the weights."""

    kind: ClassVar[str] = "still"

    def step(self, weights: Tensor, gradient: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> None:
        """Leave the weights as they are."""


def exact_method(method: Method, count: int, clip: float) -> Method:
    """Return a method whose rounds are exact steps of `count` microbatches.

    Raises UnknownOption for a method that does not exchange every gradient, whole and at once.
    """
    for number in (0, *method.breakpoints):
        _require_every_gradient(method.at_round(number))
    if method.build_for_round is not None:
        raise UnknownOption("schedule: exact steps take options that do not change over the rounds; write plain values")
    return replace(
        method,
        inner=StillWeights(),
        signal=ExactGradient(),
        codec=Float64Sum(),
        topology=GatherOptions(),
        aggregate=ExactSum(count=count, clip=clip),
    )


def _require_every_gradient(method: Method) -> None:
    """Raise UnknownOption, which begins with the component, unless a round is one step of plain gradients."""
    schedule = method.schedule
    if (schedule.inner_steps, schedule.ahead, schedule.fragments) != (1, 0, 1):
        raise UnknownOption(
            "schedule.inner_steps: exact steps exchange every gradient; write inner_steps = 1, ahead = 0"
        )
    if schedule.quorum < 1:
        raise UnknownOption("schedule.quorum: an exact step needs the contributions of all peers; write 1.0")
    is_plain = isinstance(method.signal, Gradient) and isinstance(method.inner, GradientAccumulator)
    if not is_plain or not isinstance(method.feedback, NoFeedback) or method.codec.kind != "none":
        raise UnknownOption('codec.kind: exact steps send gradients whole; write recipe = "data-parallel"')
    if method.topology.group_size:
        raise UnknownOption('topology.kind: the groups of a stage would have weights of their own; write "gather"')
    if method.update.is_scaled_by_weight:
        raise UnknownOption("update.shorten: all exact steps have the same weight; write false")

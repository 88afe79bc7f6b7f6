"""The two sides of an exchange: the trainer encodes contributions, the daemon aggregates them.

All vectors are flat fp32 on the CPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from optim.aggregation.base import (
    AggregationRule,
    LeftOut,
    RoundVerdict,
    WeightedPayload,
    limit_scale,
    norm_limit,
    update_usual_norm,
)
from optim.aggregation.mean import WeightedMean
from optim.codecs.base import Codec, Payload, as_array
from optim.codecs.residual_update import ResidualUpdate
from optim.errors import CodecError
from optim.experts import Flags, PartialVector, Senders, TrainedExpertsCodec
from optim.feedback import Feedback
from optim.kernels.vectors import ArrayVector, ConcatenatedVector, Floats, Vector, scaled
from optim.layout import Span, clip_spans
from optim.method import AGGREGATION_STATE, USUAL_NORM
from optim.round_plan import RoundPlan, RoundPlanner

Payloads = Sequence[Payload | Vector]  # encoded, or decoded by `Aggregator.decode_part`


class ContributionEncoder:
    """Encodes local progress, and keeps for the residual what the other peers will not receive."""

    def __init__(self, planner: RoundPlanner) -> None:
        self._planner = planner

    def encode(
        self, round_number: int, delta: torch.Tensor, residual: torch.Tensor, trained: Sequence[bool] = ()
    ) -> list[Payload]:
        """Encode a contribution, one payload per part; leave in `delta` what `keep_remainder` makes the new residual.

        Of `delta` and `residual`, whole vectors of the signal, only the spans that the round sends are read. There

            decay * residual + delta_before == share * decoded + delta_after

        and delta_after = 0 without feedback. The residual does not change: so a crash in between tears nothing.

        `trained` says for each expert of the model whether to send it, where the plan lets peers leave some out; by
        default all are sent. All that is known of an expert that is not sent is left in `delta`, with or without
        feedback.

        Raises:
            CodecError: a value of `delta` is not finite. `delta` is invalid afterwards.
        """
        plan = self._planner.plan(round_number)
        left, total = as_array(plan.gather(residual)), plan.gather(delta)
        held = [span for number, span in plan.experts if trained and not trained[number]]
        payloads = [
            _encode_part(
                plan.method.feedback, codec, total[start:stop], left[start:stop], clip_spans(held, start, stop)
            )
            for codec, (start, stop) in plan.parts
        ]
        plan.scatter(total, delta)
        return payloads

    def keep_remainder(self, round_number: int, delta: torch.Tensor, residual: torch.Tensor) -> None:
        """Store in the residual what `encode` has left in `delta`; doing it twice is doing it once."""
        for start, stop in self._planner.plan(round_number).spans:
            residual[start:stop] = delta[start:stop]

    def restore_to_residual(
        self, round_number: int, payloads: Sequence[Payload], residual: torch.Tensor, weight: float = 1.0
    ) -> None:
        """Add a contribution that missed its round to the residual, times `weight`, so that the next one carries it.

        A negative weight undoes that.
        """
        plan = self._planner.plan(round_number)
        if not plan.method.signal.is_delta:
            return  # absolute values: the next contribution has newer ones
        total = plan.gather(residual)
        for payload, (codec, (start, stop)) in zip(payloads, plan.parts, strict=True):
            values = codec.decode_vector(payload, stop - start)
            values.add_to(total[start:stop].numpy(), weight * plan.method.feedback.share)
        plan.scatter(total, residual)


def nonzero_mask(plan: RoundPlan, payloads: Sequence[Payload], numel: int) -> torch.Tensor:
    """Return a (numel,) bool mask of the values of a vector for which a contribution has anything but zero."""
    contribution, whole = torch.zeros(plan.numel), torch.zeros(numel)
    for payload, (codec, (start, stop)) in zip(payloads, plan.parts, strict=True):
        contribution[start:stop] = codec.decode(payload, stop - start)
    plan.scatter(contribution, whole)
    return whole != 0


def _encode_part(
    feedback: Feedback, codec: Codec, total: torch.Tensor, residual: Floats, held: Sequence[Span]
) -> Payload:
    """Return the payload of a part, and leave in `total`, its progress before, what the payload does not carry.

    Nothing within the spans `held` is sent.
    """
    update = ResidualUpdate(feedback.decay, residual)
    if held:
        update.apply(as_array(total))
        kept = [total[start:stop].clone() for start, stop in held]
        for start, stop in held:
            total[start:stop] = 0
        payload = _encode_part(feedback, codec, total, np.zeros_like(residual), ())
        for values, (start, stop) in zip(kept, held, strict=True):
            total[start:stop] = values
        return payload
    if not feedback.keeps_error:
        update.apply(as_array(total))
        payload = codec.encode(total)
        total.zero_()
        return payload
    payload = codec.encode_updated(update, total)
    if feedback.share < 1:
        codec.decode_vector(payload, total.numel()).add_to(as_array(total), 1 - feedback.share)
    return payload


@dataclass(frozen=True)
class Merged:
    """The merged vector of a round, and why members are not in it, by their index.

    `unsent` are the spans of the experts that no member sent.
    """

    vector: Vector
    left_out: Mapping[int, LeftOut] = field(default_factory=dict)
    unsent: tuple[Span, ...] = ()


class Reduced(NamedTuple):
    """The payload of a part's sum, and why members are not in it, by their index."""

    payload: Payload
    left_out: Mapping[int, LeftOut]


class Aggregator:
    """Combines the payloads of a round into one vector: the same bits on every machine and with any threads."""

    def __init__(self, planner: RoundPlanner) -> None:
        self._planner = planner

    def decode_part(self, round_number: int, payload: Payload, part: int) -> Vector:
        """Decode a payload of that part, a member's or the reduced one.

        Raises:
            CodecError: it is malformed.
        """
        plan = self._planner.plan(round_number)
        start, stop = plan.part_spans[part]
        return plan.codecs[part].decode_vector(payload, stop - start)

    def reduce_part(self, round_number: int, part: int, payloads: Payloads, weights: Sequence[float]) -> Reduced:
        """Reduce the members' payloads of one part, in the agreed order, to one payload (butterfly)."""
        plan = self._planner.plan(round_number)
        rule = plan.method.aggregate
        screening = rule.screen(_weighted_payloads(plan, part, payloads, weights))
        combined = rule.combine(screening.payloads)
        if senders := _senders(plan.codecs[part], payloads, screening):
            combined = senders.rescale(ArrayVector(combined), _divisors(rule, senders)).to_dense()
        return Reduced(plan.codecs[part].encode(torch.from_numpy(combined)), screening.left_out)

    def merge(
        self, round_number: int, payloads: Payloads, weights: Sequence[float], slots: Mapping[str, torch.Tensor]
    ) -> Merged:
        """Return the merged vector of a round, as its plan lays it out; much of it is computed when it is read.

        In a gather, takes the members' payloads with their weights, in the agreed order. In a butterfly, takes the
        reduced payloads, part by part; `weights` are ignored, because they were applied in the reduction.

        Args:
            round_number: the round.
            payloads: those of the members, or of the parts.
            weights: those of the members.
            slots: the small slots of the method's state; those of the rule and of the usual norm are updated in place.
        """
        plan = self._planner.plan(round_number)
        usual_norms = slots[USUAL_NORM].numpy()
        kind = round_number % plan.method.period
        if plan.method.topology.reduces_parts:
            total = self._join_parts(plan, payloads)
            norm, usual = total.norm(), float(usual_norms[kind])
            limit = norm_limit([norm], usual, plan.method.aggregate.gate, total.numel)
            usual_norms[kind] = update_usual_norm([norm], usual)
            return Merged(scaled(total, limit_scale(norm, usual, limit)), unsent=_unsent_of_parts(plan, payloads))
        members = _weighted_payloads(plan, 0, payloads, weights)
        slot = slots.get(AGGREGATION_STATE)
        state = None if slot is None else slot.numpy()
        screening = plan.method.aggregate.screen(members, float(usual_norms[kind]), state)
        usual_norms[kind] = screening.usual_norm
        mean = plan.method.aggregate.combine_lazily(screening.payloads, state)
        senders = _senders(plan.codecs[0], payloads, screening)
        if senders is None:
            return Merged(scaled(mean, screening.scale), screening.left_out)
        mean = senders.rescale(mean, _divisors(plan.method.aggregate, senders))
        return Merged(scaled(mean, screening.scale), screening.left_out, senders.unsent)

    def _join_parts(self, plan: RoundPlan, payloads: Payloads) -> Vector:
        if len(payloads) != len(plan.part_spans):
            raise CodecError(f"{len(payloads)} reduced parts where there are {len(plan.part_spans)}")
        reduced = zip(payloads, plan.parts, strict=True)
        members = [WeightedPayload(codec, payload, stop - start, 1.0) for payload, (codec, (start, stop)) in reduced]
        return ConcatenatedVector(tuple(member.decode() for member in members))


def _weighted_payloads(
    plan: RoundPlan, part: int, payloads: Payloads, weights: Sequence[float]
) -> list[WeightedPayload]:
    codec, (start, stop) = plan.codecs[part], plan.part_spans[part]
    members = zip(payloads, weights, strict=True)
    return [WeightedPayload(codec, payload, stop - start, float(weight)) for payload, weight in members]


def _senders(codec: Codec, payloads: Payloads, screening: RoundVerdict) -> Senders | None:
    """Return who sent which expert of a part; None if peers leave none out."""
    if not isinstance(codec, TrainedExpertsCodec):
        return None
    sent = [_read_sent(codec, payload) for payload in payloads]
    return Senders(codec.experts, sent, [payload.weight for payload in screening.payloads])


def _read_sent(codec: TrainedExpertsCodec, payload: Payload | Vector) -> Flags:
    if isinstance(payload, Vector):
        assert isinstance(payload, PartialVector)
        return payload.sent
    return codec.read_sent(payload)


def _divisors(rule: AggregationRule, senders: Senders) -> Sequence[float]:
    assert isinstance(rule, WeightedMean)
    return rule.divisors(senders.weights)


def _unsent_of_parts(plan: RoundPlan, payloads: Payloads) -> tuple[Span, ...]:
    """Return the spans of the experts that the sums of a butterfly do not contain."""
    unsent = list[Span]()
    for payload, (codec, (first, _)) in zip(payloads, plan.parts, strict=True):
        if isinstance(codec, TrainedExpertsCodec):
            sent = zip(codec.experts, _read_sent(codec, payload).tolist(), strict=True)
            unsent += [(first + start, first + stop) for (start, stop), is_sent in sent if not is_sent]
    return tuple(unsent)

"""The two sides of an exchange: the trainer's `Sender` and the daemon's `Merger`. Flat fp32 vectors on the CPU."""

from collections.abc import Sequence

import torch

from optim.aggregation.base import WeightedPayload
from optim.codecs.base import Codec, Payload, as_array
from optim.codecs.residual_update import ResidualUpdate
from optim.errors import CodecError
from optim.feedback import Feedback
from optim.kernels.vectors import ConcatenatedVector, Floats, Vector
from optim.round_plan import RoundPlan, RoundPlanner

Payloads = Sequence[Payload | Vector]  # as they came, or as `Merger.read` has read them


class ContributionEncoder:
    """Encodes local progress, and keeps in the residual what others will not get."""

    def __init__(self, planner: RoundPlanner) -> None:
        self._planner = planner

    def encode(self, round_number: int, delta: torch.Tensor, residual: torch.Tensor) -> list[Payload]:
        """One payload a part. `delta` and `residual` are whole; of both only what that round sends is looked at, and
        there `residual` changes in place so that

        decay * residual_before + delta == share * decoded + residual_after   (without feedback: residual_after = 0).

        CodecError if a value of `delta` is not finite; then `residual` is of no use any more.
        """
        plan = self._planner.plan(round_number)
        total, sent = plan.gather(residual), as_array(plan.gather(delta))
        payloads = [
            _encode_part(plan.method.feedback, codec, total[start:stop], sent[start:stop])
            for codec, (start, stop) in plan.parts
        ]
        plan.scatter(total, residual)
        return payloads

    def restore_to_residual(
        self, round_number: int, payloads: Sequence[Payload], residual: torch.Tensor, weight: float = 1.0
    ) -> None:
        """Add a message that was left out of its round to the residual again, so that the next one carries it; so many
        times: a negative `weight` undoes that."""
        plan = self._planner.plan(round_number)
        if not plan.method.signal.is_delta:
            return  # absolute values of that moment: the next message has newer ones
        total = plan.gather(residual)
        for payload, (codec, (start, stop)) in zip(payloads, plan.parts, strict=True):
            values = codec.decode_vector(payload, stop - start)
            values.add_to(total[start:stop].numpy(), weight * plan.method.feedback.share)
        plan.scatter(total, residual)


def nonzero_mask(plan: RoundPlan, payloads: Sequence[Payload], numel: int) -> torch.Tensor:
    """(numel,) bool: of which of a vector's values a message of that round says anything but zero."""
    message, whole = torch.zeros(plan.numel), torch.zeros(numel)
    for payload, (codec, (start, stop)) in zip(payloads, plan.parts, strict=True):
        message[start:stop] = codec.decode(payload, stop - start)
    plan.scatter(message, whole)
    return whole != 0


def _encode_part(feedback: Feedback, codec: Codec, total: torch.Tensor, sent: Floats) -> Payload:
    """The payload of a part; `total` is left with what it does not carry."""
    before = ResidualUpdate(feedback.decay, sent)
    if not feedback.keeps_error:
        before.apply(as_array(total))
        payload = codec.encode(total)
        total.zero_()
        return payload
    payload = codec.encode_updated(before, total)
    if feedback.share < 1:
        codec.decode_vector(payload, total.numel()).add_to(as_array(total), 1 - feedback.share)
    return payload


class Aggregator:
    """Turns the payloads of a round into one vector; the same bits on every machine and with any threads."""

    def __init__(self, planner: RoundPlanner) -> None:
        self._planner = planner

    def decode_part(self, round_number: int, payload: Payload, part: int) -> Vector:
        """CodecError if this is not a well-formed payload of that part (a member's, or the reduced one)."""
        plan = self._planner.plan(round_number)
        start, stop = plan.part_spans[part]
        return plan.codecs[part].decode_vector(payload, stop - start)

    def reduce_part(self, round_number: int, part: int, payloads: Payloads, weights: Sequence[float]) -> Payload:
        """Butterfly: the members' payloads of one part, in the agreed order, to the reduced one."""
        plan = self._planner.plan(round_number)
        combined = plan.method.aggregate.combine(_weighted_payloads(plan, part, payloads, weights))
        return plan.codecs[part].encode(torch.from_numpy(combined))

    def merge(
        self, round_number: int, payloads: Payloads, weights: Sequence[float], state: torch.Tensor | None = None
    ) -> Vector:
        """What the round came to, as its plan lays it out; much of it is computed when it is asked for.

        Gather: the members' payloads with their weights, in the agreed order, and `memory`, which changes in place, of
        an aggregate that has one. Butterfly: the reduced payloads, part by part; `weights` were used up in reducing
        and are ignored.
        """
        plan = self._planner.plan(round_number)
        if not plan.method.topology.reduces_parts:
            messages = _weighted_payloads(plan, 0, payloads, weights)
            return plan.method.aggregate.combine_lazily(messages, None if state is None else state.numpy())
        if len(payloads) != len(plan.part_spans):
            raise CodecError(f"{len(payloads)} reduced parts where there are {len(plan.part_spans)}")
        reduced = zip(payloads, plan.parts, strict=True)
        messages = [WeightedPayload(codec, payload, stop - start, 1.0) for payload, (codec, (start, stop)) in reduced]
        return ConcatenatedVector(tuple(message.decode() for message in messages))


def _weighted_payloads(
    plan: RoundPlan, part: int, payloads: Payloads, weights: Sequence[float]
) -> list[WeightedPayload]:
    codec, (start, stop) = plan.codecs[part], plan.part_spans[part]
    members = zip(payloads, weights, strict=True)
    return [WeightedPayload(codec, payload, stop - start, float(weight)) for payload, weight in members]

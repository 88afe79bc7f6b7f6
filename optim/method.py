"""A training method: one part of each kind, and what the two sides of a peer do with it.

The trainer's `Sender` turns local progress into payloads; the daemon's `Merger` turns the payloads of a round into one
pseudo-gradient; `Method.update` moves the anchor by it. All work on flat fp32 vectors of the whole model on the CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from optim.aggregate import Aggregate, Message
from optim.codecs.codec import Codec, Payload, as_array
from optim.codecs.dense import largest_magnitude
from optim.errors import CodecError
from optim.feedback import Feedback
from optim.schedules import Schedule
from optim.signals import Signal
from optim.topologies import TopologyKind
from optim.updates import Update
from optim.vectors import Floats

Bounds = tuple[int, int]


@dataclass(frozen=True)
class Method:
    """A composition. `paper` names where it comes from."""

    name: str
    paper: str
    signal: Signal
    schedule: Schedule
    codec: Codec
    feedback: Feedback
    topology: TopologyKind
    aggregate: Aggregate
    update: Update

    def bounds(self, numel: int, parts: int) -> list[Bounds]:
        """The parts in which a vector of `numel` values is sent: one for a gather, about `parts` for a butterfly."""
        return part_bounds(numel, parts if self.topology == "butterfly" else 1, self.codec.alignment)


def part_bounds(numel: int, parts: int, alignment: int) -> list[Bounds]:
    """Cut [0, numel) into `parts` spans that start at multiples of `alignment` and differ by at most one `alignment`.

    Fewer parts where there are fewer aligned blocks than that: no part is ever empty.
    """
    if numel < 1 or parts < 1:
        raise ValueError("there must be at least one value and one part")
    blocks = -(-numel // alignment)
    parts = min(parts, blocks)
    edges = [blocks * part // parts * alignment for part in range(parts)] + [numel]
    return list(zip(edges[:-1], edges[1:], strict=True))


class Sender:
    """Encodes local progress, and keeps in the residual what others will not get."""

    def __init__(self, method: Method, numel: int, parts: int) -> None:
        self._method = method
        self._bounds = method.bounds(numel, parts)

    def message(self, delta: torch.Tensor, residual: torch.Tensor) -> list[bytes]:
        """One payload a part. Changes `residual` in place so that

        decay * residual_before + delta == decoded + residual_after   (without error feedback: residual_after = 0).

        CodecError if a value of `delta` is not finite; then `residual` is unchanged.
        """
        codec, feedback = self._method.codec, self._method.feedback
        largest_magnitude(as_array(delta))
        residual *= feedback.decay
        residual += delta
        if feedback.keeps_error:
            return [codec.extract(residual[start:stop]) for start, stop in self._bounds]
        payloads = [codec.encode(residual[start:stop]) for start, stop in self._bounds]
        residual.zero_()
        return payloads

    def take_back(self, payloads: Sequence[Payload], residual: torch.Tensor) -> None:
        """Add a message that was left out of its round to the residual again, so that the next one carries it."""
        for payload, (start, stop) in zip(payloads, self._bounds, strict=True):
            part = residual[start:stop].numpy()
            self._method.codec.read(payload, stop - start).add_to(part, 1.0)


class Merger:
    """Turns the payloads of a round into one pseudo-gradient; the same bits on every machine and with any threads."""

    def __init__(self, method: Method, numel: int, parts: int) -> None:
        self._method = method
        self._numel = numel
        self.bounds = method.bounds(numel, parts)

    def check(self, payload: Payload, part: int) -> None:
        """CodecError if this is not a well-formed payload of that part (a member's, or the reduced one)."""
        start, stop = self.bounds[part]
        self._method.codec.read(payload, stop - start)

    def reduce_part(self, payloads: Sequence[Payload], weights: Sequence[float], numel: int) -> bytes:
        """Butterfly: the members' payloads of one part of `numel` values, in the agreed order, to the reduced one."""
        return self._method.codec.encode(torch.from_numpy(self._combine(payloads, weights, numel)))

    def merge(self, payloads: Sequence[Payload], weights: Sequence[float]) -> torch.Tensor:
        """The aggregated pseudo-gradient, flat fp32.

        Gather: the members' payloads with their weights (tokens), in the agreed order. Butterfly: the reduced payloads,
        part by part; `weights` were used up in reducing and are ignored.
        """
        if self._method.topology == "gather":
            return torch.from_numpy(self._combine(payloads, weights, self._numel))
        if len(payloads) != len(self.bounds):
            raise CodecError(f"{len(payloads)} reduced parts where there are {len(self.bounds)}")
        merged = torch.empty(self._numel)
        for payload, (start, stop) in zip(payloads, self.bounds, strict=True):
            merged[start:stop] = self._method.codec.decode(payload, stop - start)
        return merged

    def _combine(self, payloads: Sequence[Payload], weights: Sequence[float], numel: int) -> Floats:
        members = zip(payloads, weights, strict=True)
        messages = [Message(self._method.codec, payload, numel, float(weight)) for payload, weight in members]
        return self._method.aggregate.combine(messages)

"""From the members' messages to one pseudo-gradient.

Messages are summed in the order in which they are given, in fp32, and divided once: every peer gets the same bits.
"""

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass as plain_dataclass
from itertools import chain
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from optim.codecs.codec import Codec, Payload
from optim.errors import OptimError
from optim.exact import power
from optim.memory import zeros
from optim.parts import STRICT
from optim.sparse_means import MeanVector, SenderMeanVector, Stack, divide_where_sent
from optim.threads import each
from optim.vectors import Floats, PlainVector, SparseVector, Vector, slabs

Reader = Callable[[], Vector]


@plain_dataclass(frozen=True)
class Message:
    """One member's payload with its weight; decoded on demand, so that one dense message at a time is in memory, where
    nobody has read it before."""

    codec: Codec
    payload: Payload | Vector
    numel: int
    weight: float

    def read(self) -> Vector:
        return self.payload if isinstance(self.payload, Vector) else self.codec.read(self.payload, self.numel)


def sparse_of(messages: Sequence[Message]) -> list[SparseVector]:
    """All of them decoded, where some are already and all have room side by side in the memory of a dense one."""
    if not any(isinstance(message.payload, SparseVector) for message in messages):
        return []
    room, vectors = 4 * messages[0].numel, list[SparseVector]()
    for message in messages:
        vector = message.read()
        if not isinstance(vector, SparseVector) or vector.nbytes > room:
            return []
        room -= vector.nbytes
        vectors.append(vector)
    return vectors


def readers_of(messages: Sequence[Message]) -> list[Reader]:
    """What decodes each message. Sparse ones that have room side by side in the memory of a dense one are decoded once,
    however often they are read."""

    def reader(message: Message) -> Reader:
        known: list[SparseVector] = []

        def read() -> Vector:
            if known:
                return known[0]
            vector = message.read()
            if isinstance(vector, SparseVector) and vector.nbytes * len(messages) <= 4 * message.numel:
                known.append(vector)
            return vector

        return read

    return [reader(message) for message in messages]


class Aggregate(ABC):
    """Messages of one length, in the agreed order, to one vector. A message of weight zero is as if absent."""

    kind: ClassVar[str]

    @property
    def memory(self) -> int:
        """Numbers that all peers hold alike from round to round, zero at the start; 0: a round's messages say all."""
        return 0

    def weight(self, tokens: int, age: int) -> float:
        """Of a member that trained on so many tokens and whose message is `age` rounds late."""
        return float(tokens)

    @abstractmethod
    def combine(self, messages: Sequence[Message], memory: Floats | None = None) -> Floats:
        """CodecError if a payload is malformed, OptimError if no message has a weight. `memory` changes in place."""

    def combined(self, messages: Sequence[Message], memory: Floats | None = None) -> Vector:
        """The same bits, to be had span by span: where a rule can, it computes them when they are asked for."""
        return PlainVector(self.combine(messages, memory))


def present(messages: Sequence[Message]) -> list[Message]:
    """Those with a weight. OptimError if a weight is nonsense or there is none."""
    if not all(math.isfinite(message.weight) and message.weight >= 0 for message in messages):
        raise OptimError("weights must be finite and not negative")
    members = [message for message in messages if message.weight]
    if not members:
        raise OptimError("one of the weights must be above zero")
    return members


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Weighted(Aggregate):
    """`weights`: by the tokens each member trained on, or all alike. `clip`: no message counts with a norm above the
    median of all norms (of the part at hand, where messages are reduced in parts). The clip bounds what one member can
    do and keeps the rest of the mean as it is; the rules of `optim.robust` instead leave members out. `staleness`: a
    message that is `age` rounds late counts (1 + age)^-staleness of its weight (arXiv 2111.04338: 0.5)."""

    weights: Literal["tokens", "equal"] = "tokens"
    clip: bool = False
    staleness: float = Field(default=0.0, ge=0, le=10)

    def weight(self, tokens: int, age: int) -> float:
        return (tokens if self.weights == "tokens" else 1) * power(1 + age, -self.staleness)

    def _weigh(self, messages: Sequence[Message]) -> list[float]:
        """In units of the largest: a message of weight 1 is summed without being multiplied."""
        most = max(message.weight for message in present(messages))
        return [message.weight / most for message in messages]

    def _scales(self, vectors: Iterable[Vector], weights: Sequence[float]) -> list[float]:
        """What each message is multiplied by: its weight, and what brings its norm down to the median of those that
        count. Without a clip `vectors` are not looked at."""
        if not self.clip:
            return list(weights)
        norms = [vector.norm() for vector in vectors]
        median = statistics.median(norm for norm, weight in zip(norms, weights, strict=True) if weight)
        factors = [min(1.0, median / norm) if norm else 1.0 for norm in norms]
        return [weight * factor for weight, factor in zip(weights, factors, strict=True)]

    def combined(self, messages: Sequence[Message], memory: Floats | None = None) -> Vector:
        vectors = sparse_of(messages)
        if not vectors:
            return super().combined(messages, memory)
        weights = self._weigh(messages)
        scales = np.array(self._scales(vectors, weights), np.float32)
        return self._mean_of(Stack.of(vectors), scales, weights, messages)

    @abstractmethod
    def _mean_of(self, stack: Stack, scales: Floats, weights: Sequence[float], messages: Sequence[Message]) -> Vector:
        """Of sparse messages, to be had span by span."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Mean(_Weighted):
    """sum_i w_i x_i / sum_i w_i over all n members of the round; with `over` = "members" and equal weights it is
    sum_i w_i x_i / n, so that a step of messages that are late is also shorter (arXiv 2106.06639)."""

    kind: ClassVar[str] = "mean"

    over: Literal["weights", "members"] = "weights"

    @model_validator(mode="after")
    def _counts_members_alike(self) -> Self:
        if self.over == "members" and self.weights != "equal":
            raise ValueError("over = 'members' takes weights = 'equal'")
        return self

    def _divisor(self, messages: Sequence[Message], weights: Sequence[float]) -> np.float32:
        """Of the sum whose weights are `weights`."""
        if self.over == "weights":
            return np.float32(math.fsum(weights))
        members = present(messages)
        return np.float32(len(members) / max(member.weight for member in members))

    def combine(self, messages: Sequence[Message], memory: Floats | None = None) -> Floats:
        weights = self._weigh(messages)
        readers = readers_of(messages)
        scales, vectors = self._scales((read() for read in readers), weights), (read() for read in readers)
        first = next(vectors)
        total = zeros(first.sent.numel)
        for vector, scale in zip(chain((first,), vectors), scales, strict=True):
            vector.sent.add_to(total, scale)
        total /= self._divisor(messages, weights)
        # What transforms values is linear: it is undone once.
        return first.decoded(PlainVector(total)).dense()

    def _mean_of(self, stack: Stack, scales: Floats, weights: Sequence[float], messages: Sequence[Message]) -> Vector:
        return MeanVector(stack, scales, self._divisor(messages, weights))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SenderMean(_Weighted):
    """As `Mean`, but each coordinate is divided by the weight of those members that sent something for it.

    This is what the public codes of arXiv 2508.15706 do where its text has the mean over all members; with sparse
    messages it moves several times farther, so learning rates do not carry over from one rule to the other. A
    coordinate is what was sent: with a codec that transforms values it is a coefficient (arXiv 2411.19870).
    """

    kind: ClassVar[str] = "sender-mean"

    def combine(self, messages: Sequence[Message], memory: Floats | None = None) -> Floats:
        weights = self._weigh(messages)
        readers = readers_of(messages)
        scales, vectors = self._scales((read() for read in readers), weights), (read() for read in readers)
        first = next(vectors)
        total, senders = zeros(first.sent.numel), zeros(first.sent.numel)
        for vector, weight, scale in zip(chain((first,), vectors), weights, scales, strict=True):
            vector.sent.add_to(total, scale)
            vector.sent.add_presence_to(senders, weight)
        each(lambda part: divide_where_sent(total[part], senders[part]), slabs(total.size))
        return first.decoded(PlainVector(total)).dense()

    def _mean_of(self, stack: Stack, scales: Floats, weights: Sequence[float], messages: Sequence[Message]) -> Vector:
        return SenderMeanVector(stack, scales, np.array(weights, np.float32))

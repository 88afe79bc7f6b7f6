"""The interface of aggregation rules, and the weighted payloads that they combine."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from optim.codecs.base import Codec, Payload
from optim.errors import OptimError
from optim.kernels.vectors import ArrayVector, Floats, SparseVector, Vector

Decoder = Callable[[], Vector]


@dataclass(frozen=True)
class WeightedPayload:
    """One member's payload with its weight; decoded on demand, so that one dense message at a time is in memory, where
    nobody has read it before."""

    codec: Codec
    payload: Payload | Vector
    numel: int
    weight: float

    def decode(self) -> Vector:
        return self.payload if isinstance(self.payload, Vector) else self.codec.decode_vector(self.payload, self.numel)


def decode_sparse(payloads: Sequence[WeightedPayload]) -> list[SparseVector]:
    """All of them decoded, where some are already and all have room side by side in the memory of a dense one."""
    if not any(isinstance(message.payload, SparseVector) for message in payloads):
        return []
    room, vectors = 4 * payloads[0].numel, list[SparseVector]()
    for message in payloads:
        vector = message.decode()
        if not isinstance(vector, SparseVector) or vector.nbytes > room:
            return []
        room -= vector.nbytes
        vectors.append(vector)
    return vectors


def cached_decoders(payloads: Sequence[WeightedPayload]) -> list[Decoder]:
    """What decodes each message. Sparse ones that have room side by side in the memory of a dense one are decoded once,
    however often they are read."""

    def reader(message: WeightedPayload) -> Decoder:
        known: list[SparseVector] = []

        def read() -> Vector:
            if known:
                return known[0]
            vector = message.decode()
            if isinstance(vector, SparseVector) and vector.nbytes * len(payloads) <= 4 * message.numel:
                known.append(vector)
            return vector

        return read

    return [reader(message) for message in payloads]


class AggregationRule(ABC):
    """Messages of one length, in the agreed order, to one vector. A message of weight zero is as if absent."""

    kind: ClassVar[str]

    @property
    def state_size(self) -> int:
        """Numbers that all peers hold alike from round to round, zero at the start; 0: a round's messages say all."""
        return 0

    def weigh(self, tokens: int, age: int) -> float:
        """Of a member that trained on so many tokens and whose message is `age` rounds late."""
        return float(tokens)

    @abstractmethod
    def combine(self, payloads: Sequence[WeightedPayload], state: Floats | None = None) -> Floats:
        """CodecError if a payload is malformed, OptimError if no message has a weight. `memory` changes in place."""

    def combine_lazily(self, payloads: Sequence[WeightedPayload], state: Floats | None = None) -> Vector:
        """The same bits, to be had span by span: where a rule can, it computes them when they are asked for."""
        return ArrayVector(self.combine(payloads, state))


def drop_weightless(payloads: Sequence[WeightedPayload]) -> list[WeightedPayload]:
    """Those with a weight. OptimError if a weight is nonsense or there is none."""
    if not all(math.isfinite(message.weight) and message.weight >= 0 for message in payloads):
        raise OptimError("weights must be finite and not negative")
    members = [message for message in payloads if message.weight]
    if not members:
        raise OptimError("one of the weights must be above zero")
    return members

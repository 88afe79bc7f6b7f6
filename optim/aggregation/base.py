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
    """One member's payload with its weight.

    It is decoded on demand, so that only one dense contribution at a time is in memory, unless it was decoded before.
    """

    codec: Codec
    payload: Payload | Vector
    numel: int
    weight: float

    def decode(self) -> Vector:
        return self.payload if isinstance(self.payload, Vector) else self.codec.decode_vector(self.payload, self.numel)


def decode_sparse(payloads: Sequence[WeightedPayload]) -> list[SparseVector]:
    """Decode all payloads, if they are sparse and together need no more memory than a dense one.

    Returns:
        The vectors in order; an empty list if they are not, or if none is decoded already.
    """
    if not any(isinstance(payload.payload, SparseVector) for payload in payloads):
        return []
    free_bytes, vectors = 4 * payloads[0].numel, list[SparseVector]()
    for payload in payloads:
        vector = payload.decode()
        if not isinstance(vector, SparseVector) or vector.nbytes > free_bytes:
            return []
        free_bytes -= vector.nbytes
        vectors.append(vector)
    return vectors


def cached_decoders(payloads: Sequence[WeightedPayload]) -> list[Decoder]:
    """Return a decoder for each payload, which keeps its vector if all fit into the memory of a dense one.

    Only sparse vectors are kept; they are decoded once, however often they are read.
    """

    def make_decoder(payload: WeightedPayload) -> Decoder:
        cached: list[SparseVector] = []

        def decode() -> Vector:
            if cached:
                return cached[0]
            vector = payload.decode()
            if isinstance(vector, SparseVector) and vector.nbytes * len(payloads) <= 4 * payload.numel:
                cached.append(vector)
            return vector

        return decode

    return [make_decoder(payload) for payload in payloads]


class AggregationRule(ABC):
    """A rule that combines payloads of one length, in the agreed order, into one vector. Weight zero means absent."""

    kind: ClassVar[str]

    @property
    def state_size(self) -> int:
        """Return the size of the state that all peers share from round to round; 0 for stateless rules.

        It is zero at the start.
        """
        return 0

    def weigh(self, tokens: int, age: int) -> float:
        """Return the weight of a member that trained on `tokens` and whose contribution is `age` rounds late."""
        return float(tokens)

    @abstractmethod
    def combine(self, payloads: Sequence[WeightedPayload], state: Floats | None = None) -> Floats:
        """Combine the payloads; updates `state` in place.

        Raises:
            CodecError: a payload is malformed.
            OptimError: no payload has a weight, or a weight is invalid.
        """

    def combine_lazily(self, payloads: Sequence[WeightedPayload], state: Floats | None = None) -> Vector:
        """Combine the payloads to the same bits as `combine`, computing each span when it is read where possible."""
        return ArrayVector(self.combine(payloads, state))


def drop_weightless(payloads: Sequence[WeightedPayload]) -> list[WeightedPayload]:
    """Return the payloads that have a weight.

    Raises:
        OptimError: a weight is negative or not finite, or all are zero.
    """
    if not all(math.isfinite(payload.weight) and payload.weight >= 0 for payload in payloads):
        raise OptimError("weights must be finite and not negative")
    members = [payload for payload in payloads if payload.weight]
    if not members:
        raise OptimError("one of the weights must be above zero")
    return members

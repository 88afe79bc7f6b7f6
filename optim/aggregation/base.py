"""The interface of aggregation rules, and the weighted payloads that they combine.

Every rule refuses contributions whose norm is far above the usual one, so that no message moves the model by more than
another.

All peers share the usual norm U of a contribution, one for each kind of round (fragments and periods differ):

    M = the lower median of the norms |x_i| > 0 of a round
    refused where |x_i| > gate * (U, or M while U is not known), or the root mean square of x_i is above 1024
    U <- M in the first round;  U <- min(max(M, U - U / 8), 2 U)

Norms change over a run, most of all while the learning rate warms up, and U follows them within a few rounds. If all
contributions of a round are above the gate, the round's mean is scaled down to U instead: a jump that all peers made
together delays a run by a few short steps, and a liar that is alone in a round gains nothing.

A reducer of a butterfly judges the norms of its part by their lower median, without U, so that a sum follows from the
contributions alone. All peers then limit the sum of the round: U is the usual norm of sums, and a sum above gate * U is
scaled down to U.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import ClassVar, Final, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from optim.codecs.base import Codec, Payload
from optim.errors import OptimError
from optim.kernels.vectors import ArrayVector, Floats, SparseVector, Vector
from optim.options import STRICT

MAX_FALL: Final = 1 / 8  # per round, as a fraction of U
MAX_RISE: Final = 2.0
MAX_RMS: Final = 1024.0  # of progress, gradients or weights; codecs accept values up to 2^47
MAX_USUAL_NORM: Final = 1e30
Decoder = Callable[[], Vector]
LeftOut = Literal[
    "too large", "zero", "too small", "copy", "replay", "against the others"
]  # why a rule leaves a contribution out


def update_usual_norm(norms: Sequence[float], usual: float) -> float:
    """Return U after a round with these norms, as an fp32: the same on every machine."""
    known = [norm for norm in norms if norm > 0]
    if not known:
        return usual
    middle = median_low(known)
    after = min(max(middle, usual * (1 - MAX_FALL)), usual * MAX_RISE) if usual else middle
    return float(np.float32(min(after, MAX_USUAL_NORM)))


def norm_limit(norms: Sequence[float], usual: float, gate: float, numel: int) -> float:
    """Return the largest norm of `numel` values that passes; `usual` is U before the round, 0 if it is not known."""
    return min(gate * (usual or update_usual_norm(norms, 0.0)), MAX_RMS * math.sqrt(numel))


def limit_scale(norm: float, usual: float, limit: float) -> float:
    """Return the factor that scales a norm above the limit down to `usual`, to 0 if that is not known; else 1."""
    return float(np.float32(usual / norm)) if norm > limit else 1.0


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


@dataclass(frozen=True)
class RoundVerdict:
    """The verdict on the payloads of a round: those left out have weight zero.

    `norms` has 0 for payloads without a weight. `left_out` gives the reason by index. The mean of the others is to be
    multiplied by `scale`. `usual_norm` is that after the round.
    """

    payloads: tuple[WeightedPayload, ...]
    norms: tuple[float, ...]
    left_out: Mapping[int, LeftOut] = field(default_factory=dict)
    scale: float = 1.0
    usual_norm: float = 0.0

    def leave_out(self, left_out: Mapping[int, LeftOut]) -> "RoundVerdict":
        """Return the verdict with more payloads left out."""
        payloads = (
            dataclasses.replace(payload, weight=0.0) if index in left_out else payload
            for index, payload in enumerate(self.payloads)
        )
        return dataclasses.replace(self, payloads=tuple(payloads), left_out={**self.left_out, **left_out})


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class AggregationRule(ABC):
    """A rule that combines payloads of one length, in the agreed order, into one vector. Weight zero means absent.

    `gate`: a contribution whose norm is above this multiple of the usual one is left out
    (`optim.aggregation.base`).
    """

    kind: ClassVar[str]

    gate: float = Field(default=10.0, ge=2, le=1e6, description="largest norm of a contribution, in usual norms")

    @property
    def state_size(self) -> int:
        """Return the size of the state that all peers share from round to round; 0 for stateless rules.

        It is zero at the start.
        """
        return 0

    @property
    def state_range(self) -> tuple[float, float]:
        """Return the least and the largest value of that state, in addition to the range of all slots."""
        return 0.0, math.inf

    @property
    def keeps_block_statistics(self) -> bool:
        """Return whether the state has a place for each block of the model."""
        return False

    def weigh(self, tokens: int, age: int) -> float:
        """Return the weight of a member that trained on `tokens` and whose contribution is `age` rounds late."""
        return float(tokens)

    def screen(
        self, payloads: Sequence[WeightedPayload], usual_norm: float = 0.0, state: Floats | None = None
    ) -> RoundVerdict:
        """Decide which payloads count; `usual_norm` is that before the round, 0 if it is not known.

        A rule that remembers contributions updates `state` in place.

        Raises:
            CodecError: a payload is malformed.
            OptimError: no payload has a weight, or a weight is invalid.
        """
        drop_weightless(payloads)
        payloads, norms = _measure(payloads)
        limit = norm_limit(norms, usual_norm, self.gate, payloads[0].numel)
        after = update_usual_norm(norms, usual_norm)
        screening = RoundVerdict(payloads, norms, usual_norm=after)
        large: dict[int, LeftOut] = {index: "too large" for index, norm in enumerate(norms) if norm > limit}
        if all(index in large for index, norm in enumerate(norms) if norm):
            return dataclasses.replace(screening, scale=limit_scale(max(norms), usual_norm, limit))
        return screening.leave_out(large)

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


def _measure(payloads: Sequence[WeightedPayload]) -> tuple[tuple[WeightedPayload, ...], tuple[float, ...]]:
    """Return the payloads and their norms; sparse ones stay decoded if all fit into the memory of a dense one."""
    kept, norms = [], []
    for payload in payloads:
        vector = payload.decode() if payload.weight else None
        norms.append(0.0 if vector is None else vector.coefficients.norm())
        is_small = isinstance(vector, SparseVector) and vector.nbytes * len(payloads) <= 4 * payload.numel
        kept.append(dataclasses.replace(payload, payload=vector) if is_small and vector is not None else payload)
    return tuple(kept), tuple(norms)


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

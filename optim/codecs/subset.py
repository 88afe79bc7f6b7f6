"""A random subset of the values, without a byte for their positions (random replication, arXiv 2502.06728).

The vector is cut into as many stretches as values are sent, all of nearly the same length, and of each one value is
drawn. The receiver draws the same from the seed in the payload. The seed comes from the values: each message has
another subset, and the same values always give the same bytes. Values are not scaled up by the inverse of the density;
error feedback brings what was left out in a later round.

Senders draw apart from each other. A subset that all members share needs a seed that all know, the round's number,
which a codec is not told.

Payload: head, seed (u64, every one is valid), payload of the inner codec.
"""

import hashlib
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Final, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.codecs.codec import Codec, Payload
from optim.codecs.dense import BrainFloat, HalfPrecision, largest_magnitude
from optim.codecs.integers import BlockInt4, BlockInt8
from optim.codecs.signs import BlockSign
from optim.parts import STRICT
from optim.vectors import Floats, Positions, SparseVector

Inner = Literal["bf16", "fp16", "int8", "int4", "sign"]
INNER: Final[Mapping[Inner, Codec]] = MappingProxyType(
    {"bf16": BrainFloat(), "fp16": HalfPrecision(), "int8": BlockInt8(), "int4": BlockInt4(), "sign": BlockSign()}
)
SAMPLED = 1 << 16  # values that the seed is made from


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RandomSubset(Codec):
    kind: ClassVar[str] = "subset"
    number: ClassVar[int] = 10
    version: ClassVar[int] = 1

    density: float = Field(default=1 / 64, ge=2**-16, le=1, description="share of the values that is sent")
    values: Inner = "int8"

    def max_bytes(self, numel: int) -> int:
        return 10 + self._inner.max_bytes(self._kept(numel))

    def write(self, values: Floats, subtract: bool) -> bytes:
        largest_magnitude(values)
        seed = _seed(values)
        positions = _draw(seed, values.size, self._kept(values.size))
        kept = values[positions]
        payload = self.head() + seed + self._inner.write(kept, subtract)
        if subtract:
            values[positions] = kept
        return payload

    def read(self, payload: Payload, numel: int) -> SparseVector:
        reader = self.open(payload, numel)
        seed = reader.take("u1", 8).tobytes()
        kept = self._kept(numel)
        values = self._inner.read(reader.rest(), kept).dense()
        return SparseVector(_draw(seed, numel, kept), values, numel)

    @property
    def _inner(self) -> Codec:
        return INNER[self.values]

    def _kept(self, numel: int) -> int:
        return min(numel, math.ceil(numel * self.density))


def _seed(values: Floats) -> bytes:
    sample = np.ascontiguousarray(values[:: -(-values.size // SAMPLED)], "<f4")
    return hashlib.sha256(sample.tobytes()).digest()[:8]


def _draw(seed: bytes, numel: int, count: int) -> Positions:
    """One position of each stretch. Philox is counter-based and its raw words are the same everywhere."""
    edges = np.arange(count + 1, dtype=np.int64) * numel // count
    words = np.random.Philox(key=int.from_bytes(seed, "little")).random_raw(count) >> np.uint64(32)
    # As if each stretch were cut into 2^32 equal steps.
    return edges[:-1] + (words.astype(np.int64) * np.diff(edges) >> 32)

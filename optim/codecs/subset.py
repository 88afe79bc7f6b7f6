"""A subset of the values that both sides know, without a byte for the positions (arXiv 2502.06728).

`random`: the vector is cut into as many stretches as values are sent, all of nearly the same length, and of each one
value is drawn. `striding`: every stride-th value, from round mod stride on, so that in `stride` rounds each value has
its turn. (The paper's public code moves the offset by a multiple of the number of rows, which is no move at all where
that divides: the same rows for ever. Here the offset moves by one a round; a vector that is sent only every few rounds
is covered if their number has no divisor in common with the stride.)

`shared`: all members send the same positions, drawn from the round's number that the codec must be bound to, and sums
of messages are as sparse as one message; encoding such a sum loses nothing but the precision of its values. Otherwise
each draws apart, from a seed in its payload that comes from the values: each message has another subset, and the same
values always give the same bytes. Values are not scaled up by the inverse of the density; error feedback brings what
was left out in a later round.

Payload: head, seed (u64, every one is valid) unless shared, payload of the inner codec.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Final, Literal, Self

import numpy as np
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from optim.codecs.base import SAMPLE_SIZE, Codec, Payload
from optim.codecs.bits.deterministic_random import SEED_BYTES, seed_from_values, short_digest
from optim.codecs.bits.magnitudes import largest_magnitude
from optim.codecs.floats import BFloat16, Float16
from optim.codecs.int_blocks import BlockInt4, BlockInt8
from optim.codecs.sign import BlockSign
from optim.kernels.vectors import Floats, Positions, SparseVector
from optim.options import STRICT

ValueCodec = Literal["bf16", "fp16", "int8", "int4", "sign"]
VALUE_CODECS: Final[Mapping[ValueCodec, Codec]] = MappingProxyType(
    {"bf16": BFloat16(), "fp16": Float16(), "int8": BlockInt8(), "int4": BlockInt4(), "sign": BlockSign()}
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RandomSubset(Codec):
    kind: ClassVar[str] = "subset"
    number: ClassVar[int] = 10
    version: ClassVar[int] = 2

    density: float = Field(default=1 / 64, ge=2**-16, le=1, description="share of the values that is sent")
    values: ValueCodec = "int8"
    selection: Literal["random", "striding"] = "random"
    shared: bool = True

    @model_validator(mode="after")
    def _check_striding(self) -> Self:
        if self.selection == "striding" and not self.shared:
            raise ValueError("striding goes by the round's number, which all share: shared must be true")
        return self

    @property
    def depends_on_round(self) -> bool:
        return self.shared

    def max_bytes(self, numel: int) -> int:
        most = self._sent_count(numel) if self.selection == "random" else -(-numel // self._stride(numel))
        return 2 + self._seed_bytes + self._value_codec.max_bytes(most)

    def bits_per_parameter(self, numel: int) -> float:
        sampled = min(numel, SAMPLE_SIZE)
        kept = self._sent_count(sampled) / sampled if self.selection == "random" else 1 / self._stride(sampled)
        head = 8 * (2 + self._seed_bytes) / sampled
        return head + kept * self._value_codec.bits_per_parameter(max(1, round(sampled * kept)))

    def encode_array(self, values: Floats, subtract: bool) -> Payload:
        largest_magnitude(values)
        seed = b"" if self.shared else seed_from_values(values)
        positions = self._positions(seed, values.size)
        kept = values[positions]
        payload = b"".join((self.header(), seed, self._value_codec.encode_array(kept, subtract)))
        if subtract:
            values[positions] = kept
        return payload

    def decode_vector(self, payload: Payload, numel: int) -> SparseVector:
        reader = self.open_payload(payload, numel)
        seed = b"" if self.shared else reader.read("u1", SEED_BYTES).tobytes()
        positions = self._positions(seed, numel)
        values = self._value_codec.decode_vector(reader.read_rest(), positions.size).to_dense()
        return SparseVector(positions, values, numel)

    @property
    def _value_codec(self) -> Codec:
        return VALUE_CODECS[self.values]

    @property
    def _seed_bytes(self) -> int:
        return 0 if self.shared else SEED_BYTES

    def _sent_count(self, numel: int) -> int:
        return min(numel, math.ceil(numel * self.density))

    def _stride(self, numel: int) -> int:
        return min(numel, round(1 / self.density))

    def _positions(self, seed: bytes, numel: int) -> Positions:
        if self.selection == "striding":
            stride = self._stride(numel)
            return np.arange(self._bound_round() % stride, numel, stride, dtype=np.int64)
        return _draw_positions(
            seed or short_digest(f"murmur subset {self._bound_round()}".encode()), numel, self._sent_count(numel)
        )

    def _bound_round(self) -> int:
        if self.binding is None:
            raise ValueError("positions that all share go by the round's number: bind the codec to one first")
        return self.binding.round_number


def _draw_positions(seed: bytes, numel: int, count: int) -> Positions:
    """One position of each stretch. Philox is counter-based and its raw words are the same everywhere."""
    edges = np.arange(count + 1, dtype=np.int64) * numel // count
    words = np.random.Philox(key=int.from_bytes(seed, "little")).random_raw(count) >> np.uint64(32)
    # As if each stretch were cut into 2^32 equal steps.
    return edges[:-1] + (words.astype(np.int64) * np.diff(edges) >> 32)

"""A subset of the values that both sides know, without a byte for the positions (arXiv 2502.06728).

`random` cuts the vector into as many stretches of nearly equal length as values are sent, and draws one value of each.
`striding` sends every stride-th value, from round mod stride on, so that each value is sent once in `stride` rounds.
(The paper's public code moves the offset by a multiple of the number of rows, which has no effect where that divides:
it sends the same rows for ever. Here the offset moves by one per round; a vector that is sent only every few rounds is
covered if their number has no common divisor with the stride.)

With `shared`, all members send the same positions, drawn from the round number that the codec must be bound to. Sums of
contributions are then as sparse as one of them, and encoding such a sum loses only the precision of its values.
Otherwise each member draws from a seed in its payload that is made from the values: each contribution has another
subset, and the same values always give the same bytes. Values are not scaled up by the inverse of the density; error
feedback sends the omitted ones in a later round.

Payload: header, seed (u64, every one is valid) unless shared, payload of the inner codec.
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

    density: float = Field(default=1 / 64, ge=2**-16, le=1, description="fraction of the values to send")
    values: ValueCodec = "int8"
    selection: Literal["random", "striding"] = "random"
    shared: bool = True

    @model_validator(mode="after")
    def _check_striding(self) -> Self:
        if self.selection == "striding" and not self.shared:
            raise ValueError("striding follows the round number, which all members share: set shared = true")
        return self

    @property
    def depends_on_round(self) -> bool:
        return self.shared

    def max_bytes(self, numel: int) -> int:
        count = self._sent_count(numel) if self.selection == "random" else -(-numel // self._stride(numel))
        return 2 + self._seed_bytes + self._value_codec.max_bytes(count)

    def bits_per_parameter(self, numel: int) -> float:
        sampled = min(numel, SAMPLE_SIZE)
        kept = self._sent_count(sampled) / sampled if self.selection == "random" else 1 / self._stride(sampled)
        prefix_bits = 8 * (2 + self._seed_bytes) / sampled
        return prefix_bits + kept * self._value_codec.bits_per_parameter(max(1, round(sampled * kept)))

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
            raise ValueError("shared positions follow the round number: bind the codec to a round first")
        return self.binding.round_number


def _draw_positions(seed: bytes, numel: int, count: int) -> Positions:
    """Draw one position of each stretch. Philox is counter-based, and its raw words are the same everywhere."""
    edges = np.arange(count + 1, dtype=np.int64) * numel // count
    words = np.random.Philox(key=int.from_bytes(seed, "little")).random_raw(count) >> np.uint64(32)
    # A word is a fraction of 2^32 of its stretch.
    return edges[:-1] + (words.astype(np.int64) * np.diff(edges) >> 32)

"""A vector as one byte for each of a few random directions (arXiv 2306.10015: one byte per gradient for any model).

    p_j = <x, z_j>, every z_j of -1 and 1 alone, drawn from a seed;   decoded = sum_j p_j z_j / d

The mean of z z^T is the unit matrix, so the mean over many contributions is x, but one contribution is sqrt(N / d)
times as long as x. It is meant for fine-tuning with small steps, not for training from scratch, and not for error
feedback, whose residual would grow by the same factor in every round. The paper measures p with two evaluations of the
loss, (L(theta + eps z) - L(theta - eps z)) / (2 eps), and no gradient; <x, z> with a gradient x is the limit of that
for small eps. A new peer that has the contributions needs no weights: they are the whole change of the model.

A byte is a sign, five bits of exponent and two of fraction, rounded up with the probability of the remainder, so that
the mean is right. With signs and powers of two every product is exact, hence the same on all machines.

Payload: header, count of values (uint32), seed (8 bytes), one byte per direction.
"""

import hashlib
import struct
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.codecs.base import Codec, Payload
from optim.codecs.bits.deterministic_random import SEED_BYTES, seed_from_values
from optim.codecs.bits.magnitudes import largest_magnitude
from optim.errors import CodecError
from optim.kernels.parallel import thread_buffer
from optim.kernels.vectors import DenseVector, Floats, slabs
from optim.options import STRICT

SIGN_BIT = 0x80
MIN_LEVEL = 2.0**-20
# The magnitudes of codes 0 to 127: zero, then four per octave.
LEVELS: Floats = np.array([(4 + code % 4) / 4 * 2.0 ** (code // 4) * MIN_LEVEL for code in range(128)], np.float32)
LEVELS[0] = 0
SIGNS_PER_COUNTER = 256  # signs that one step of the generator's counter makes


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RandomProjection(Codec):
    """decoded = sum_j <x, z_j> z_j / d, where each z_j has random signs; each <x, z_j> takes one byte."""

    kind: ClassVar[str] = "direction"
    number: ClassVar[int] = 12
    version: ClassVar[int] = 1
    is_contractive: ClassVar[bool] = False

    directions: int = Field(default=1, ge=1, le=4096, description="d: bytes per contribution")

    def max_bytes(self, numel: int) -> int:
        return 2 + 4 + SEED_BYTES + self.directions

    def encode_array(self, values: Floats, subtract: bool) -> Payload:
        largest_magnitude(values)
        seed = seed_from_values(values)
        codes = bytes(self._encode_projection(values, seed, number) for number in range(self.directions))
        payload = self.header() + struct.pack("<I", values.size) + seed + codes
        if subtract:
            self.decode_vector(payload, values.size).subtract_from(values)
        return payload

    def decode_vector(self, payload: Payload, numel: int) -> DenseVector:
        reader = self.open_payload(payload, numel)
        if int(reader.read("u4", 1)[0]) != numel:
            raise CodecError("the payload is of a vector of another length")
        seed = reader.read("u1", SEED_BYTES).tobytes()
        codes = reader.read("u1", self.directions)
        reader.expect_end()
        if (codes == SIGN_BIT).any():
            raise CodecError("a zero has a sign")
        steps = LEVELS[codes & ~np.uint8(SIGN_BIT)] / np.float32(self.directions)
        steps[codes >= SIGN_BIT] *= -1

        def restore(part: slice, out: Floats) -> None:
            out.fill(0)
            for number, step in enumerate(steps):
                out += np.array([step, -step], np.float32)[_sign_bits(seed, number, part)]

        return DenseVector(numel, restore)

    def _encode_projection(self, values: Floats, seed: bytes, number: int) -> int:
        projection = sum(_project(values[part], _sign_bits(seed, number, part)) for part in slabs(values.size))
        below = int(np.searchsorted(LEVELS, abs(projection), side="right")) - 1
        if below < LEVELS.size - 1:
            fraction = (abs(projection) - float(LEVELS[below])) / float(LEVELS[below + 1] - LEVELS[below])
            below += _generator(seed, number, values.size).random_raw() < fraction * 2.0**64
        return below | SIGN_BIT if projection < 0 and below else below


def _project(values: Floats, bits: npt.NDArray[np.uint8]) -> float:
    """Return the sum of the values whose bit is 0, minus the sum of the others."""
    signs = thread_buffer("signs", np.float32, values.size)
    np.multiply(bits, np.float32(-2), out=signs)
    signs += 1
    signs *= values
    return float(signs.sum(dtype=np.float64))


def _sign_bits(seed: bytes, number: int, slab: slice) -> npt.NDArray[np.uint8]:
    """Return 1 for each value of the slab where that direction is -1, else 0."""
    first = slab.start // SIGNS_PER_COUNTER * SIGNS_PER_COUNTER
    words = _generator(seed, number, first).random_raw(-(-(slab.stop - first) // 64)).astype("<u8", copy=False)
    return np.unpackbits(words.view(np.uint8), bitorder="little")[slab.start - first : slab.stop - first]


def _generator(seed: bytes, number: int, first_value: int) -> np.random.Philox:
    """Return a generator whose first word has the signs from value `first_value` on.

    Philox is counter-based, and its raw words are the same everywhere.
    """
    key = hashlib.sha256(b"murmur direction" + seed + struct.pack("<I", number)).digest()[:16]
    return np.random.Philox(key=np.frombuffer(key, "<u8")).advance(first_value // SIGNS_PER_COUNTER)

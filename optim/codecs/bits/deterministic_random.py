"""Noise for stochastic rounding that the values themselves determine, so that encoding is a function on every machine.

The key of a contribution is made from the round, if the codec is bound to one, and from a sample of the values. The key
of a block is made from that, its number and its scale. So no other round, contribution or part of it sees the same
noise. The word of a value is a function of its block's key and its index, in 32-bit integers, which processors compute
several at once and all alike: multiplications and shifts that let each bit affect every other. (The constants are those
that the search of github.com/skeeto/hash-prospector found least biased.)
"""

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from optim.kernels.jit import subroutine
from optim.kernels.vectors import Floats

MAX_SAMPLED_VALUES = 1 << 16  # most values to make a seed from
SEED_BYTES = 8
FRACTION_UNIT = np.float32(2.0**-24)  # scales the upper 24 bits of a word to [0, 1)
FIRST_SHIFT, SHIFT, FIRST_FACTOR, SECOND_FACTOR = map(np.uint32, (16, 15, 0x21F0_AAAD, 0xD35A_2D97))


class NoiseKey(NamedTuple):
    """The key of a contribution's noise."""

    low: np.uint32
    high: np.uint32


def seed_from_values(values: Floats) -> bytes:
    """Return a seed that follows from the values and hardly ever occurs for another member."""
    sample = np.ascontiguousarray(values[:: -(-values.size // MAX_SAMPLED_VALUES)], "<f4")
    return short_digest(sample.tobytes())


def short_digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:SEED_BYTES]


def noise_key(values: Floats, round_number: int | None) -> NoiseKey:
    """Return the key of a contribution's noise; `None` means that the codec is not bound to a round."""
    text = f"murmur noise {-1 if round_number is None else round_number}\0".encode()
    return NoiseKey(*np.frombuffer(short_digest(text + seed_from_values(values)), "<u4"))


@subroutine
def block_key(low: np.uint32, high: np.uint32, number: int, half: np.uint32) -> np.uint32:
    """Return the key of a block from its number and the upper half of its scale."""
    return mix_bits(np.uint32(mix_bits(np.uint32(np.uint32(number) ^ low)) ^ high) + half)


@subroutine
def mix_bits(word: np.uint32) -> np.uint32:
    """Map words one to one, so that each bit of the input reaches every bit of the result."""
    word = np.uint32(np.uint32(word ^ (word >> FIRST_SHIFT)) * FIRST_FACTOR)
    word = np.uint32(np.uint32(word ^ (word >> SHIFT)) * SECOND_FACTOR)
    return np.uint32(word ^ (word >> SHIFT))


def philox_words(text: bytes, count: int) -> npt.NDArray[np.uint64]:
    """Return 64-bit words that follow from `text` alone: Philox is counter-based and the same everywhere."""
    key = np.frombuffer(hashlib.sha256(text).digest()[:16], "<u8")
    return np.random.Philox(key=key).random_raw(count).astype("<u8", copy=False)

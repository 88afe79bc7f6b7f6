"""Noise for stochastic rounding that the values themselves determine: encoding is a function, on every machine.

Philox is counter-based and its raw words are the same everywhere. Its key is made from the round, where the codec is
bound to one, and from the scales of some neighbouring blocks and what place they have, so that neither another round
nor another message nor another part of it sees the same noise.
"""

import hashlib

import numpy as np
import numpy.typing as npt

from optim.codecs.codec import Binding
from optim.vectors import Floats

SAMPLED = 1 << 16  # values that a seed is made from
SEED = 8  # bytes of it
FRACTION = np.float32(2.0**-24)  # of the upper 24 bits of a word: to [0, 1)
Words = npt.NDArray[np.uint32]


def seed_of(values: Floats) -> bytes:
    """That follows from the values, so that encoding is a function, and that another member hardly has."""
    sample = np.ascontiguousarray(values[:: -(-values.size // SAMPLED)], "<f4")
    return digest(sample.tobytes())


def digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:SEED]


def words(scales: Floats, place: int, count: int, binding: Binding | None) -> Words:
    """Evenly distributed 32-bit words for `count` values in blocks with these `scales`."""
    round_number = -1 if binding is None else binding.round_number
    text = f"murmur noise {round_number} {place}\0".encode() + scales.astype("<f4", copy=False).tobytes()
    drawn: Words = raw_words(text, -(-count // 2)).view("<u4")
    return drawn[:count]


def raw_words(text: bytes, count: int) -> npt.NDArray[np.uint64]:
    """64-bit words that follow from `text` alone."""
    key = np.frombuffer(hashlib.sha256(text).digest()[:16], "<u8")
    return np.random.Philox(key=key).random_raw(count).astype("<u8", copy=False)

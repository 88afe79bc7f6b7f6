"""One power of two that fp16 values share, so that neither tiny nor large pseudo-gradients leave fp16.

value = fp16 * 2^exponent, where the exponent puts the largest value into [2^14, 2^15): 29 powers of two below it are
held to 2^-11 relative, and smaller values lose precision only in absolute terms that do not matter beside the largest.
"""

import math

import numpy as np

from optim.codecs.codec import PayloadReader
from optim.errors import CodecError

MIN_EXPONENT, MAX_EXPONENT = -100, 32  # exponents; decoded values stay below 2^48 and out of the subnormal range
TOP_EXPONENT = 15
FLOAT16_LIMIT = np.float16(2.0**TOP_EXPONENT).view(np.uint16)


def shared_exponent(largest: float) -> int:
    """CodecError where the largest magnitude is not finite or beyond the format."""
    if not largest < 2.0 ** (MAX_EXPONENT + TOP_EXPONENT):
        raise CodecError(f"values up to {largest:.3g} cannot be encoded")
    return max(MIN_EXPONENT, math.frexp(largest)[1] - TOP_EXPONENT) if largest else 0


def read_exponent(reader: PayloadReader) -> int:
    exponent = int(reader.read("i1", 1)[0])
    if not MIN_EXPONENT <= exponent <= MAX_EXPONENT:
        raise CodecError(f"exponent {exponent} is out of range")
    return exponent


def power_of_two(exponent: int) -> np.float32:
    """2^exponent; multiplying by it is exact but for results below fp32's normal range."""
    return np.float32(2.0**exponent)

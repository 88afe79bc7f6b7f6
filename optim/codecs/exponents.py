"""One power of two that fp16 values share, so that neither tiny nor large pseudo-gradients leave fp16.

value = fp16 * 2^exponent, where the exponent puts the largest value into [2^14, 2^15): 29 powers of two below it are
held to 2^-11 relative, and smaller values lose precision only in absolute terms that do not matter beside the largest.
"""

import math

import numpy as np

from optim.codecs.codec import Reader
from optim.errors import CodecError

LOWEST, HIGHEST = -100, 32  # exponents; decoded values stay below 2^48 and out of the subnormal range
TOP = 15
HALF_LIMIT = np.float16(2.0**TOP).view(np.uint16)


def shared_exponent(largest: float) -> int:
    """CodecError where the largest magnitude is not finite or beyond the format."""
    if not largest < 2.0 ** (HIGHEST + TOP):
        raise CodecError(f"values up to {largest:.3g} cannot be encoded")
    return max(LOWEST, math.frexp(largest)[1] - TOP) if largest else 0


def read_exponent(reader: Reader) -> int:
    exponent = int(reader.take("i1", 1)[0])
    if not LOWEST <= exponent <= HIGHEST:
        raise CodecError(f"exponent {exponent} is out of range")
    return exponent


def power(exponent: int) -> np.float32:
    """2^exponent; multiplying by it is exact but for results below fp32's normal range."""
    return np.float32(2.0**exponent)

"""Non-negative scales as fp16 with one shared power of two, so that neither tiny nor large pseudo-gradients leave fp16.

scale = fp16 * 2^exponent, where the exponent puts the largest scale into [2^14, 2^15): 29 powers of two below it are
held to 2^-11 relative, and smaller scales lose precision only in absolute terms that do not matter beside the largest.
"""

import math

import numpy as np

from optim.codecs.codec import Reader
from optim.errors import CodecError
from optim.vectors import Floats

LOWEST, HIGHEST = -100, 32  # exponents; decoded scales stay below 2^48 and out of the subnormal range
TOP = 15
HALF_LIMIT = np.float16(2.0**TOP).view(np.uint16)


def write_scales(scales: Floats) -> tuple[bytes, Floats]:
    """The wire form (one byte and two a scale), and the scales as the receiver will see them."""
    exponent = shared_exponent(float(scales.max()))
    halves = (scales * power(-exponent)).astype("<f2")
    return np.int8(exponent).tobytes() + halves.tobytes(), halves.astype(np.float32) * power(exponent)


def read_scales(reader: Reader, count: int) -> Floats:
    """`count` scales, each finite, at least +0 and below 2^48."""
    exponent = read_exponent(reader)
    halves = reader.take("f2", count)
    # As integers: a sign bit, an infinity and a NaN all lie above every fp16 from +0 to 2^15.
    if halves.view("<u2").max() > HALF_LIMIT:
        raise CodecError("a scale is negative, not finite or too large")
    return halves.astype(np.float32) * power(exponent)


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

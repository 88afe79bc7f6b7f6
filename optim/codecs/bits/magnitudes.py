"""The magnitudes that every codec accepts, and how to find the largest one of a vector.

A magnitude is the bits of an fp32 without its sign. As integers, magnitudes sort as the numbers do, and those of
infinities and NaN are above all others, so that one comparison finds every value that no codec may send.
"""

import numpy as np

from optim.errors import CodecError
from optim.kernels.jit import MAGNITUDE_MASK, float_to_bits, kernel
from optim.kernels.parallel import parallel_for
from optim.kernels.vectors import Floats, slabs

MAX_EXPONENT, TOP_EXPONENT = 32, 15  # of Float16: the largest shared exponent, and that of the largest fp16 value
MAGNITUDE_LIMIT = 2.0 ** (MAX_EXPONENT + TOP_EXPONENT)  # all values are below it, so that their sums are finite
MAGNITUDE_LIMIT_BITS = int(np.float32(MAGNITUDE_LIMIT).view(np.uint32))


def largest_magnitude(values: Floats) -> float:
    """Return max |x|.

    Raises:
        CodecError: a value is not finite, or too large to be summed safely.
    """
    found: list[int] = []
    parallel_for(lambda part: found.append(max_magnitude_bits(values[part])), slabs(values.size))
    check_magnitude(max(found))
    return float(np.uint32(max(found)).view(np.float32))


def check_magnitude(bits: int, limit: int = MAGNITUDE_LIMIT_BITS - 1) -> None:
    """Raise CodecError if a largest magnitude is above the limit."""
    if bits > limit:
        raise CodecError("a value is not finite or too large")


@kernel
def max_magnitude_bits(values: Floats) -> int:
    """Return the bits of the largest magnitude; those of infinities and NaN are above those of all numbers."""
    top = np.uint32(0)
    for i in range(values.size):  # no view: in a loop over blocks its reference counts take as long as the loop
        top = max(top, np.uint32(float_to_bits(values[i]) & MAGNITUDE_MASK))
    return int(top)

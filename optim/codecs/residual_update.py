"""What was left of earlier messages, and what has come since: the total that a message is made of."""

from dataclasses import dataclass

import numpy as np

from optim.codecs.bits.magnitudes import check_magnitude
from optim.kernels.jit import MAGNITUDE_MASK, kernel
from optim.kernels.parallel import parallel_for
from optim.kernels.vectors import Floats, wide_slabs


@dataclass(frozen=True)
class ResidualUpdate:
    """total <- decay * total + sent, each rounded."""

    decay: float
    delta: Floats

    def apply(self, total: Floats) -> None:
        """CodecError if a value of `sent` is not finite or too large."""
        decay, delta = np.float32(self.decay), self.delta
        parallel_for(
            lambda part: check_magnitude(decay_and_add(total[part], decay, delta[part])), wide_slabs(total.size)
        )


NO_UPDATE = ResidualUpdate(1.0, np.empty(0, np.float32))


@kernel
def decay_and_add(total: Floats, decay: np.float32, delta: Floats) -> int:
    """And the bits of the largest magnitude sent; those of infinities and NaN are above all numbers'."""
    bits, top = delta.view(np.uint32), np.uint32(0)
    for place in range(total.size):
        total[place] = total[place] * decay + delta[place]
        top = max(top, np.uint32(bits[place] & MAGNITUDE_MASK))
    return int(top)

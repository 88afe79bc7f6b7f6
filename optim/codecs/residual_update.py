"""The update of a residual by new progress, which gives the total to encode."""

from dataclasses import dataclass

import numpy as np

from optim.codecs.bits.magnitudes import check_magnitude
from optim.kernels.jit import MAGNITUDE_MASK, kernel
from optim.kernels.parallel import parallel_for
from optim.kernels.vectors import Floats, wide_slabs


@dataclass(frozen=True)
class ResidualUpdate:
    """total <- decay * total + delta, each operation rounded."""

    decay: float
    delta: Floats

    def apply(self, total: Floats) -> None:
        """Update `total` in place.

        Raises:
            CodecError: a value of `delta` is not finite or too large.
        """
        decay, delta = np.float32(self.decay), self.delta
        parallel_for(
            lambda part: check_magnitude(decay_and_add(total[part], decay, delta[part])), wide_slabs(total.size)
        )


NO_UPDATE = ResidualUpdate(1.0, np.empty(0, np.float32))


@kernel
def decay_and_add(total: Floats, decay: np.float32, delta: Floats) -> int:
    """Update `total` and return the bits of the largest magnitude of `delta`, as `max_magnitude_bits` does."""
    bits, top = delta.view(np.uint32), np.uint32(0)
    for i in range(total.size):
        total[i] = total[i] * decay + delta[i]
        top = max(top, np.uint32(bits[i] & MAGNITUDE_MASK))
    return int(top)

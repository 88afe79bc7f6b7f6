"""The update of a residual by new progress, which gives the total to encode."""

from dataclasses import dataclass

import numpy as np

from optim.codecs.bits.magnitudes import check_magnitude
from optim.kernels.jit import MAGNITUDE_MASK, kernel
from optim.kernels.parallel import parallel_for
from optim.kernels.vectors import Floats, wide_slabs


@dataclass(frozen=True)
class ResidualUpdate:
    """delta <- decay * residual + delta, each operation rounded; the residual does not change."""

    decay: float
    residual: Floats

    def apply(self, delta: Floats) -> None:
        """Update `delta` in place.

        Raises:
            CodecError: a value of `delta` is not finite or too large.
        """
        decay, residual = np.float32(self.decay), self.residual
        parallel_for(
            lambda part: check_magnitude(add_decayed(delta[part], decay, residual[part])), wide_slabs(delta.size)
        )


NO_UPDATE = ResidualUpdate(1.0, np.empty(0, np.float32))


@kernel
def add_decayed(delta: Floats, decay: np.float32, residual: Floats) -> int:
    """Update `delta`; return the bits of its largest magnitude before, as `max_magnitude_bits` does."""
    bits, top = delta.view(np.uint32), np.uint32(0)
    for i in range(delta.size):
        top = max(top, np.uint32(bits[i] & MAGNITUDE_MASK))
        delta[i] = residual[i] * decay + delta[i]
    return int(top)

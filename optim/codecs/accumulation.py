"""What was left of earlier messages, and what has come since: the total that a message is made of."""

from dataclasses import dataclass

import numpy as np

from optim.codecs.dense import check_largest
from optim.compiled import MAGNITUDE, compiled
from optim.threads import each
from optim.vectors import Floats, wide_slabs


@dataclass(frozen=True)
class Accumulation:
    """total <- decay * total + sent, each rounded."""

    decay: float
    sent: Floats

    def apply(self, total: Floats) -> None:
        """CodecError if a value of `sent` is not finite or too large."""
        decay = np.float32(self.decay)
        each(lambda part: check_largest(move_on(total[part], decay, self.sent[part])), wide_slabs(total.size))


NOTHING = Accumulation(1.0, np.empty(0, np.float32))


@compiled
def move_on(total: Floats, decay: np.float32, sent: Floats) -> int:
    """And the bits of the largest magnitude sent; those of infinities and NaN are above all numbers'."""
    bits, top = sent.view(np.uint32), np.uint32(0)
    for place in range(total.size):
        total[place] = total[place] * decay + sent[place]
        top = max(top, np.uint32(bits[place] & MAGNITUDE))
    return int(top)

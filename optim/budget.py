"""A budget of bits for a run, spent where they lower the loss most: given for schedule.inner_steps instead of a number,

    "8 bits over 500 steps"       8 bits for each parameter in messages, over 500 local steps

becomes the course "1 -> H over K - 1" of that many steps, with as many messages as that pays for. Between two messages
that are h steps apart peers part by h times their progress of a step, and what that costs goes by its square: h c(t)
for each step, c(t) the squared progress of a step then. Of all ways to place K messages in the run that with h in
proportion to 1 / sqrt(c) costs least. Progress falls about as one over the root of the steps made; then h grows with
that root, which is a straight line over the rounds.
"""

import bisect
import math
import re
from dataclasses import dataclass

import numpy as np

from optim.errors import UnknownOption
from optim.options import Scalar
from optim.ramps import NUMBER

_BUDGET = re.compile(rf"\s*(?P<bits>{NUMBER})\s+bits\s+over\s+(?P<steps>[0-9]{{1,9}})\s+steps\s*")


@dataclass(frozen=True)
class Budget:
    """`bits`: of each parameter in the whole run of `steps` local steps."""

    bits: float
    steps: int

    def course(self, bits_of_message: float, fragments: int = 1) -> Scalar:
        """For schedule.inner_steps; one message of each fragment costs so many bits a parameter together.
        UnknownOption where the budget does not pay for them."""
        affordable = math.floor(self.bits / bits_of_message)
        if affordable < 1:
            raise UnknownOption(
                f"schedule.inner_steps: a message takes {bits_of_message:.3g} bits a parameter, and the budget is "
                f"{self.bits:g}; raise it or choose a smaller codec"
            )
        if affordable == 1 or self.steps <= affordable * fragments:
            return max(fragments, -(-self.steps // affordable))
        last = _last(fragments, affordable, self.steps)
        return f"{fragments} -> {last} over {(affordable - 1) * fragments}" if last > fragments else last


def _last(first: int, count: int, total: int) -> int:
    """The least to which so many whole numbers may grow in a straight line to make the total together."""

    def together(last: int) -> int:
        return int(np.rint(np.linspace(first, last, count)).sum())

    return bisect.bisect_left(range(total), total, lo=first, key=together)


def budget(value: Scalar) -> Budget | None:
    """None for anything else."""
    found = _BUDGET.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    bits, steps = float(found["bits"]), int(found["steps"])
    if not (math.isfinite(bits) and bits > 0 and steps):
        raise UnknownOption(f"{value!r}: bits and steps must be above zero")
    return Budget(bits, steps)

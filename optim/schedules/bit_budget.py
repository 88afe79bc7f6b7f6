"""A budget of bits for a whole run, spent on contributions where they lower the loss most.

A manifest gives it for schedule.inner_steps instead of a number:

    { bits = 8, steps = 500 }       8 bits of contributions per parameter, over 500 local steps

It becomes a linear curve from 1 to H local steps between contributions, with as many contributions as the budget pays
for. Between two contributions that are h steps apart, peers diverge by h times their progress of a step, and the cost
is proportional to its square: h c(t) per step, where c(t) is the squared progress of a step at time t. The cheapest way
to place K contributions in the run has h proportional to 1 / sqrt(c). Progress falls roughly as one over the root of
the number of steps, so h grows with that root, which is a straight line over the rounds.
"""

import bisect
import math
from collections.abc import Mapping
from typing import Annotated, Final

import numpy as np
from pydantic import Field

from optim.errors import UnknownOption
from optim.options import OptionValue
from optim.schedules.option_schedules import MAX_ROUNDS, Curve, Number, OptionSchedule, TableModel, read_table

OPTION: Final = "schedule.inner_steps"
EXAMPLE: Final = "{ bits = 8, steps = 500 }"


class BitBudget(TableModel):
    """`bits` per parameter for a whole run of `steps` local steps."""

    bits: Annotated[Number, Field(gt=0)]
    steps: int = Field(ge=1, le=MAX_ROUNDS)

    def inner_steps(self, bits_of_message: float, fragments: int = 1) -> int | OptionSchedule:
        """Return the local steps between contributions.

        Args:
            bits_of_message: the bits per parameter of one contribution of every fragment together.
            fragments: the number of contributions that carry all values.

        Raises:
            UnknownOption: the budget does not pay for one contribution of every fragment.
        """
        affordable = math.floor(self.bits / bits_of_message)
        if affordable < 1:
            raise UnknownOption(
                f"{OPTION}: a contribution takes {bits_of_message:.3g} bits per parameter, and the budget is "
                f"{self.bits:g}; raise it or choose a smaller codec"
            )
        if affordable == 1 or self.steps <= affordable * fragments:
            return max(fragments, -(-self.steps // affordable))
        last = _last(fragments, affordable, self.steps)
        if last <= fragments:
            return last
        return OptionSchedule((), Curve(start=fragments, end=last, rounds=(affordable - 1) * fragments))


def _last(first: int, count: int, total: int) -> int:
    """Return the smallest end of a linear curve of `count` integers whose sum reaches the total."""

    def total_steps(last: int) -> int:
        return int(np.rint(np.linspace(first, last, count)).sum())

    return bisect.bisect_left(range(total), total, lo=first, key=total_steps)


def read_bit_budget(value: OptionValue) -> BitBudget | None:
    """Read the bit budget of schedule.inner_steps; return None for any other value.

    Raises:
        UnknownOption: the table has unknown keys or values out of range.
    """
    if isinstance(value, str) and "bits over" in value:
        raise UnknownOption(f"{OPTION} = {value!r}: a bit budget is a table; write {EXAMPLE}")
    if isinstance(value, Mapping) and value.keys() & BitBudget.model_fields.keys():
        return read_table(BitBudget, OPTION, value, EXAMPLE)
    return None

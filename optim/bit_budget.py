"""A number of bits for a whole run, spent on messages where they lower the loss most.

A manifest gives it for schedule.inner_steps instead of a number:

    { bits = 8, steps = 500 }       8 bits for each parameter in messages, over 500 local steps

It becomes a linear curve from 1 to H local steps between messages, with as many messages as the budget pays for.
Between two messages that are h steps apart, peers diverge by h times their progress of a step, and the cost of that is
proportional to its square: h c(t) for each step, where c(t) is the squared progress of a step at time t. The cheapest
way to place K messages in the run has h proportional to 1 / sqrt(c). Progress falls about as one over the root of the
number of steps made, so h grows with that root, which is a straight line over the rounds.
"""

import bisect
import math
from collections.abc import Mapping
from typing import Annotated, Final

import numpy as np
from pydantic import Field

from optim.errors import UnknownOption
from optim.option_schedules import MAX_ROUNDS, Curve, Number, OptionSchedule, TableModel, read_table
from optim.options import OptionValue

OPTION: Final = "schedule.inner_steps"
EXAMPLE: Final = "{ bits = 8, steps = 500 }"


class BitBudget(TableModel):
    """`bits`: for each parameter in the whole run of `steps` local steps."""

    bits: Annotated[Number, Field(gt=0)]
    steps: int = Field(ge=1, le=MAX_ROUNDS)

    def inner_steps(self, bits_of_message: float, fragments: int = 1) -> int | OptionSchedule:
        """Return the local steps between messages.

        Args:
            bits_of_message: the cost for each parameter of one message of every fragment together.

        Raises:
            UnknownOption: the budget does not pay for one message of every fragment.
        """
        affordable = math.floor(self.bits / bits_of_message)
        if affordable < 1:
            raise UnknownOption(
                f"{OPTION}: a message takes {bits_of_message:.3g} bits a parameter, and the budget is "
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

    def together(last: int) -> int:
        return int(np.rint(np.linspace(first, last, count)).sum())

    return bisect.bisect_left(range(total), total, lo=first, key=together)


def read_bit_budget(value: OptionValue) -> BitBudget | None:
    """Read the budget of schedule.inner_steps; None for any other value. Raises UnknownOption."""
    if isinstance(value, str) and "bits over" in value:
        raise UnknownOption(f"{OPTION} = {value!r}: a bit budget is a table; write {EXAMPLE}")
    if isinstance(value, Mapping) and value.keys() & BitBudget.model_fields.keys():
        return read_table(BitBudget, OPTION, value, EXAMPLE)
    return None

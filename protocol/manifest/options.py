"""The shape of a method's options in a manifest: plain values, tables of these, and lists of phases."""

import math
from typing import Annotated

from pydantic import BeforeValidator

Scalar = bool | int | float | str
ScalarTable = dict[str, Scalar]
OptionValue = Scalar | ScalarTable | tuple[Scalar | ScalarTable, ...]
MAX_PHASES = 64
MAX_OPTION_KEYS = 8


def _check_option(value: object) -> OptionValue:
    """Check the shape of an option, not its meaning.

    It is a plain value, a table of these, or a list of both.
    """
    if not isinstance(value, list | tuple):
        return _check_table_or_scalar(value)
    if not 2 <= len(value) <= MAX_PHASES:
        raise ValueError(f"a list has 2 to {MAX_PHASES} phases")
    return tuple(_check_table_or_scalar(phase) for phase in value)


def _check_table_or_scalar(value: object) -> Scalar | ScalarTable:
    if not isinstance(value, dict):
        return _check_scalar(value)
    if len(value) > MAX_OPTION_KEYS:
        raise ValueError(f"the table of an option has at most {MAX_OPTION_KEYS} keys")
    return {str(key): _check_scalar(scalar) for key, scalar in value.items()}


def _check_scalar(value: object) -> Scalar:
    if not isinstance(value, Scalar):
        raise ValueError("write a plain value, a table of plain values, or a list of phases")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


OptionTable = dict[str, Annotated[OptionValue, BeforeValidator(_check_option)]]

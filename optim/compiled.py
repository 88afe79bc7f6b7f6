"""Loops over values as machine code: one pass through memory where operations on whole arrays take several.

A compiled function is plain Python over numpy arrays and numbers. It is compiled at its first call, by numba, kept on
disk for the processes after, and lets go of the interpreter while it runs, so that threads.py can spread it. It rounds
where the source says so, at every operation, and never multiplies and adds in one step: the same bits on every machine.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The same function, faster. Division by zero gives what IEEE 754 says; indices are not checked."""
    decorate: Any = numba.njit(nogil=True, cache=True, error_model="numpy")
    return cast(Callable[Parameters, Result], decorate(function))

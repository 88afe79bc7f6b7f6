"""Loops over values as machine code: one pass through memory where operations on whole arrays take several.

A compiled function is plain Python over numpy arrays and numbers. It is compiled at its first call with arguments of
some types, by numba, kept on disk for the processes after (machine_code.py), and lets go of the interpreter while it
runs, so that threads.py can spread it. It rounds where the source says so, at every operation, and never multiplies and
adds in one step: the same bits on every machine.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from optim.machine_code import Kept, choose_processor

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
MAGNITUDE = np.uint32(0x7FFF_FFFF)  # of an fp32's bits, all but the sign; sorted, they are as the numbers are
LOOPS: list[Any] = []  # all compiled functions of the modules that are loaded

choose_processor()


def compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The same function, faster. Division by zero gives what IEEE 754 says; indices are not checked."""
    dispatcher: Any = numba.njit(nogil=True, error_model="numpy")(function)
    dispatcher._cache = Kept(cast(FunctionType, function))  # numba's own forgets what a loop calls in other files
    LOOPS.append(dispatcher)
    return cast(Callable[Parameters, Result], dispatcher)


def _reinterpreted(source: Any, target: Any, word: ir.Type) -> Any:
    """For compiled functions alone: a number's bits as another type."""

    def type_of(_: Any, number: Any) -> Any:
        def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], word)

        return target(source), generate

    return intrinsic(type_of)


bits_of: Callable[[np.float32], np.uint32] = _reinterpreted(types.float32, types.uint32, ir.IntType(32))
float_of: Callable[[np.uint32], np.float32] = _reinterpreted(types.uint32, types.float32, ir.FloatType())

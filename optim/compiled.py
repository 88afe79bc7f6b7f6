"""Loops over values as machine code: one pass through memory where operations on whole arrays take several.

A compiled function is plain Python over C-ordered numpy arrays and numbers; it returns a whole number, a truth or
nothing. Its machine code is made at its first call with arguments of some kinds (compiler.py), kept on disk for the
processes after (machine_code.py), which need no compiler, and lets go of the interpreter while it runs, so that
threads.py can spread it. It rounds where the source says so, at every operation, and never multiplies and adds in one
step: the same bits on every machine.
"""

import threading
from collections.abc import Callable
from ctypes import byref, c_int64, c_void_p
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from optim import machine_code
from optim.machine_code import Kind

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
MAGNITUDE = np.uint32(0x7FFF_FFFF)  # of an fp32's bits, all but the sign; sorted, they are as the numbers are
LOOPS: list["Loop"] = []  # all compiled functions of the modules that are loaded
NUMBERS = {bool: "bool", int: "int64", float: "float64"}

_compiling = threading.Lock()


class Loop:
    """`made`: how many times its machine code was not found on disk."""

    def __init__(self, function: FunctionType) -> None:
        self.function = function
        self.made = 0
        self._natives: dict[tuple[Kind, ...], Callable[..., int]] = {}
        self._known: dict[tuple[object, ...], Callable[..., int]] = {}  # the same, by what is soonest looked at

    @property
    def signatures(self) -> list[tuple[Kind, ...]]:
        """Kinds of arguments that it has machine code for in this process."""
        return list(self._natives)

    def __call__(self, *arguments: Any) -> int:
        look, words = list[object](), list[Any]()
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                if not (argument.flags.c_contiguous and argument.flags.aligned):
                    raise ValueError("an array whose values do not lie one after the other")
                look += argument.dtype.char, argument.ndim
                words += argument.ctypes.data, *argument.shape
            else:
                look.append(type(argument))
                words.append(argument.item() if isinstance(argument, np.generic) else argument)
        native = self._known.get(tuple(look))
        if native is None:
            native = self._known[tuple(look)] = self._prepared(tuple(map(_kind, arguments)))
        result = c_int64()
        if native(byref(result), byref(c_void_p()), *words):
            raise MemoryError(f"no room to compute {self.function.__qualname__}")  # nothing else can go wrong in one
        return result.value

    def _prepared(self, kinds: tuple[Kind, ...]) -> Callable[..., int]:
        with _compiling:
            if kinds not in self._natives:
                code = machine_code.find(self.function, kinds)
                if code is None:
                    code = self.make(kinds)
                self._natives[kinds] = machine_code.load(code, kinds)
            return self._natives[kinds]

    def make(self, kinds: tuple[Kind, ...]) -> bytes:
        """Compile and keep it."""
        from optim.compiler import compile_loop  # where all is kept, the compiler is never loaded

        code = compile_loop(self.function, kinds)
        machine_code.keep(self.function, kinds, code)
        self.made += 1
        return code


def _kind(argument: Any) -> Kind:
    if isinstance(argument, np.ndarray):
        return argument.dtype.name, argument.ndim
    return NUMBERS.get(type(argument)) or type(argument).__name__, 0


def compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The same function, faster. Division by zero gives what IEEE 754 says; indices are not checked."""
    loop = Loop(cast(FunctionType, function))
    LOOPS.append(loop)
    return cast(Callable[Parameters, Result], loop)


@compiled
def bits_of(number: np.float32) -> np.uint32:
    """For compiled functions alone."""
    return np.float32(number).view(np.uint32)


@compiled
def float_of(bits: np.uint32) -> np.float32:
    """For compiled functions alone."""
    return np.uint32(bits).view(np.float32)

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

from optim.kernels import code_cache
from optim.kernels.code_cache import ArgumentType

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
MAGNITUDE_MASK = np.uint32(0x7FFF_FFFF)  # of an fp32's bits, all but the sign; sorted, they are as the numbers are
JIT_FUNCTIONS: list["JitFunction"] = []  # all compiled functions of the modules that are loaded
NUMBER_TYPES = {bool: "bool", int: "int64", float: "float64"}

_compile_lock = threading.Lock()


class JitFunction:
    """`made`: how many times its machine code was not found on disk."""

    def __init__(self, function: FunctionType) -> None:
        self.function = function
        self.compile_count = 0
        self._by_argument_types: dict[tuple[ArgumentType, ...], Callable[..., int]] = {}
        self._by_fast_key: dict[tuple[object, ...], Callable[..., int]] = {}  # the same, by what is soonest looked at

    @property
    def signatures(self) -> list[tuple[ArgumentType, ...]]:
        """Kinds of arguments that it has machine code for in this process."""
        return list(self._by_argument_types)

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
        native = self._by_fast_key.get(tuple(look))
        if native is None:
            native = self._by_fast_key[tuple(look)] = self._specialize(tuple(map(_argument_type, arguments)))
        result = c_int64()
        if native(byref(result), byref(c_void_p()), *words):
            raise MemoryError(f"no room to compute {self.function.__qualname__}")  # nothing else can go wrong in one
        return result.value

    def _specialize(self, kinds: tuple[ArgumentType, ...]) -> Callable[..., int]:
        with _compile_lock:
            if kinds not in self._by_argument_types:
                code = code_cache.find_cached(self.function, kinds)
                if code is None:
                    code = self.make(kinds)
                self._by_argument_types[kinds] = code_cache.load(code, kinds)
            return self._by_argument_types[kinds]

    def make(self, kinds: tuple[ArgumentType, ...]) -> bytes:
        """Compile and keep it."""
        from optim.kernels.compiler import compile_function  # where all is kept, the compiler is never loaded

        code = compile_function(self.function, kinds)
        code_cache.store(self.function, kinds, code)
        self.compile_count += 1
        return code


def _argument_type(argument: Any) -> ArgumentType:
    if isinstance(argument, np.ndarray):
        return argument.dtype.name, argument.ndim
    return NUMBER_TYPES.get(type(argument)) or type(argument).__name__, 0


def jit(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The same function, faster. Division by zero gives what IEEE 754 says; indices are not checked."""
    loop = JitFunction(cast(FunctionType, function))
    JIT_FUNCTIONS.append(loop)
    return cast(Callable[Parameters, Result], loop)


@jit
def float_to_bits(number: np.float32) -> np.uint32:
    """For compiled functions alone."""
    return np.float32(number).view(np.uint32)


@jit
def bits_to_float(bits: np.uint32) -> np.float32:
    """For compiled functions alone."""
    return np.uint32(bits).view(np.float32)

"""Compile loops over values with numba: one pass through memory where array operations take several.

A kernel is plain Python over C-ordered numpy arrays and numbers. It releases the interpreter's lock while it runs, so
that `parallel.each` can spread it over threads. Every operation rounds to its own result; a product and a sum are never
contracted to one fused step, so the bits are the same on every machine.

Machine code is kept on disk for the processes that start later, one directory for each kind of processor. Processes may
compile the same kernel at the same time, because every kernel has a single signature and so writes the same file.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar, cast

import numpy as np
from llvmlite import binding as llvm

from optim.kernels.sources import KernelFiles

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

PACKAGE: Final = Path(__file__).parents[1]
# numba reads a file .numba_config.yaml in the working directory, which may turn its compiler off: when it is imported,
# and again whenever it compiles.
with chdir(PACKAGE):
    import numba
    from numba.core import config as numba_config
    from numba.np import linalg as numba_linalg
numba_config._config_fname = ""
_import_blas: Final = numba_linalg.ensure_blas


def ensure_blas() -> None:
    """Import scipy's BLAS once a function multiplies matrices, which no kernel does.

    numba would import it with the first machine code that a process loads, in 0.3 s.
    """
    if not hasattr(sys.modules.get("numba.np.arraymath"), "_HAVE_BLAS"):
        raise ImportError("numba asks while it imports itself")
    _import_blas()


numba_linalg.ensure_blas = ensure_blas
MAGNITUDE_MASK: Final = np.uint32(0x7FFF_FFFF)  # the bits of an fp32 without its sign, which sort as the numbers do
# where numba looks for machine code of other packages in this process, unless the user names other places
LOCATORS: Final = numba_config.CACHE_LOCATOR_CLASSES or (
    "UserProvidedCacheLocator,InTreeCacheLocator,UserWideCacheLocator,IPythonCacheLocator,ZipCacheLocator"
)
OPTIONS: Final = {"nogil": True, "error_model": "numpy"}


def cache_directory() -> Path | None:
    """Create and return the directory for machine code of this processor, or `None` where nothing can be written."""
    for parent in _cache_parents():
        directory = parent / f"kernels-{processor_digest()}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(directory, os.W_OK):
            return directory
    return None


def _cache_parents() -> Iterator[Path]:
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(given)
    yield PACKAGE / "__pycache__"
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if user_cache.is_absolute():  # a user without a home directory has none
        yield user_cache / "murmur"


def processor_digest() -> str:
    """Return a digest of the processor that numba compiles for."""
    named = numba.config.CPU_NAME, numba.config.CPU_FEATURES
    found = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    return hashlib.sha256(repr((named, found)).encode()).hexdigest()[:16]


CACHE: Final = cache_directory()
if CACHE:
    KernelFiles.directory = CACHE
    numba.config.CACHE_LOCATOR_CLASSES = f"{KernelFiles.__module__}.KernelFiles,{LOCATORS}"


def kernel(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function for callers in Python, at its first call or from the cache.

    Division by zero follows IEEE 754, and indices are not checked.
    """
    KernelFiles.kernels.add(function)
    compiled: Any = numba.njit(cache=CACHE is not None, **OPTIONS)(function)
    return cast(Callable[Parameters, Result], compiled)


def subroutine(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function for kernels alone, as a part of each that calls it."""
    compiled: Any = numba.njit(**OPTIONS)(function)
    return cast(Callable[Parameters, Result], compiled)


@subroutine
def float_to_bits(number: np.float32) -> np.uint32:
    return np.float32(number).view(np.uint32)


@subroutine
def bits_to_float(bits: np.uint32) -> np.float32:
    return np.uint32(bits).view(np.float32)

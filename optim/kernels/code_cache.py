"""Where machine code of compiled loops is kept, so that one process on a machine compiles for all that come after.

A loop's code is a file of its own, named after all it follows from: the loop, the kind of processor, the versions of
the compilers and every source file of this package, since a loop contains those it calls, and the kinds of arguments it
is called with. It is looked for in the directory that NUMBA_CACHE_DIR names, beside the source, where an image has it,
and in the user's own cache, and written to the first of these that can be written. Files appear whole, whoever else
writes the same, and are read only where their digest is right. Where none can be written each process compiles for
itself.

A file is object code as a compiler of C would write it, linked into this process by LLVM. Processors are told apart by
the levels of the x86-64 ABI alone: code is then the same for whole fleets of machines, and can be made elsewhere.
"""

import ctypes
import hashlib
import logging
import os
import secrets
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any, Final

from llvmlite import binding as llvm

log = logging.getLogger(__name__)
ArgumentType = tuple[str, int]  # a numpy type, and how many dimensions; 0: a number
PACKAGE = Path(__file__).parents[1]
DIGEST_BYTES = 32  # bytes
ENTRY_NAME: Final = "loop"  # what a file's function is called
C_TYPES: Final = {"bool": ctypes.c_bool, "float32": ctypes.c_float, "float64": ctypes.c_double} | {
    f"{sign}int{bits}": getattr(ctypes, f"c_{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
}
# What a level has beside those of the levels below it.
LEVEL_FEATURES: Final = {
    "x86-64-v2": {"cx16", "popcnt", "sahf", "sse3", "ssse3", "sse4.1", "sse4.2"},
    "x86-64-v3": {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}
_linked: list[llvm.ExecutionEngine] = []  # code lives as long as its engine


def highest_level(features: set[str]) -> str | None:
    """Of the x86-64 ABI; none where a processor has not even the second."""
    found = None
    for level, wanted in LEVEL_FEATURES.items():
        if not wanted <= features:
            break
        found = level
    return found


@cache
def processor() -> str:
    """For which code is compiled: this one's level, unless the environment names another or it has none."""
    named = os.environ.get("NUMBA_CPU_NAME")
    if named or not sysconfig.get_platform().endswith("x86_64"):
        return named or str(llvm.get_host_cpu_name())
    features = llvm.get_host_cpu_features()
    return highest_level({name for name, present in features.items() if present}) or str(llvm.get_host_cpu_name())


@cache
def _target() -> llvm.Target:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple()


def target_machine() -> llvm.TargetMachine:
    """What writes code for `processor()`."""
    return _target().create_target_machine(cpu=processor(), opt=3, jit=True)


def load(code: bytes, kinds: tuple[ArgumentType, ...]) -> Callable[..., int]:
    """A function that takes where its result goes, where an exception would, and the arguments: of an array its address
    and its sizes. Zero if all went well. It runs without the interpreter's lock."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _linked.append(engine)
    words: list[Any] = [ctypes.c_void_p, ctypes.c_void_p]
    for name, dimensions in kinds:
        words += [ctypes.c_void_p, *[ctypes.c_int64] * dimensions] if dimensions else [C_TYPES[name]]
    return ctypes.CFUNCTYPE(ctypes.c_int32, *words)(engine.get_function_address(ENTRY_NAME))


def find_cached(function: FunctionType, kinds: tuple[ArgumentType, ...]) -> bytes | None:
    """Object code that an earlier process kept."""
    name = _file_prefix(function) + _argument_digest(kinds)
    kept = (_read(place / name) for place in cache_dirs(_source(function)))
    return next((code for code in kept if code is not None), None)


def store(function: FunctionType, kinds: tuple[ArgumentType, ...], code: bytes) -> None:
    """For the processes after, in place of what other versions left."""
    version = _file_prefix(function)
    for place in cache_dirs(_source(function)):
        try:
            place.mkdir(parents=True, exist_ok=True)
            _write(place / (version + _argument_digest(kinds)), code)
            _remove_stale(place, version)
        except OSError as error:
            _warn_once(f"machine code is not kept in {place}: {error.strerror}")
        else:
            return


def _remove_stale(place: Path, version: str) -> None:
    """For this loop and such a processor."""
    loop, processor, _ = version.split(".", 2)
    for path in place.glob(f"{loop}.{processor}.*.loop"):
        if not path.name.startswith(version):
            path.unlink(missing_ok=True)


def _source(function: FunctionType) -> Path:
    return Path(function.__code__.co_filename)


def _file_prefix(function: FunctionType) -> str:
    """The name of a file, but for the kinds of arguments."""
    source = _source(function)
    loop = f"{source.stem}-{function.__qualname__.replace('<locals>.', '').replace('.', '-')}"
    return f"{loop}.{processor()}.{source_digest(source)[:16]}."


def _argument_digest(kinds: tuple[ArgumentType, ...]) -> str:
    return hashlib.sha256(repr(kinds).encode()).hexdigest()[:16] + ".loop"


@cache
def source_digest(own: Path) -> str:
    """A digest of what machine code follows from: all sources of this package, a function's own, and the versions."""
    versions = (sys.version, sysconfig.get_platform(), version("numba"), version("llvmlite"))
    digest = hashlib.sha256(repr(versions).encode())
    for path in sorted({*PACKAGE.rglob("*.py"), own}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cache_dirs(source: Path) -> Iterator[Path]:
    """Directories, the preferred first."""
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(given)
    yield source.parent / "__pycache__"
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    if own.is_absolute():
        yield own / "murmur"


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None  # it is not there, or not for us: the next place, or compiled anew
    if hashlib.sha256(content[DIGEST_BYTES:]).digest() == content[:DIGEST_BYTES]:
        return content[DIGEST_BYTES:]
    log.warning("%s is damaged and made anew", path)
    return None


def _write(path: Path, content: bytes) -> None:
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        draft.write_bytes(hashlib.sha256(content).digest() + content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)

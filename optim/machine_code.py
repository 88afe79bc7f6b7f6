"""Where machine code of compiled loops is kept, so that one process on a machine compiles for all that come after.

A loop's code is a file of its own, named after all it follows from: the loop, the kind of processor, the versions of
the compilers and every source file of this package, since a loop contains those it calls, and the types it is called
with. It is looked for in the directory that NUMBA_CACHE_DIR names, beside the source, where an image has it, and in the
user's own cache, and written to the first of these that can be written. Files appear whole, whoever else writes the
same, and are read only where their digest is right. Where none can be written each process compiles for itself.

Processors are told apart by the levels of the x86-64 ABI alone: code is then the same for whole fleets of machines, and
can be made elsewhere.
"""

import hashlib
import logging
import os
import pickle
import secrets
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import llvmlite
import llvmlite.binding
import numba
from numba.core import serialize
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult

log = logging.getLogger(__name__)
PACKAGE = Path(__file__).parent
DIGEST = 32  # bytes
# What a level has beside those of the levels below it.
LEVELS: Final = {
    "x86-64-v2": {"cx16", "popcnt", "sahf", "sse3", "ssse3", "sse4.1", "sse4.2"},
    "x86-64-v3": {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}


def highest_level(features: set[str]) -> str | None:
    """Of the x86-64 ABI; none where a processor has not even the second."""
    found = None
    for level, wanted in LEVELS.items():
        if not wanted <= features:
            break
        found = level
    return found


def choose_processor() -> None:
    """Compile for this processor's level, unless the environment names another or it has none."""
    if numba.config.CPU_NAME is None and sysconfig.get_platform().endswith("x86_64"):
        features = llvmlite.binding.get_host_cpu_features()
        level = highest_level({name for name, present in features.items() if present})
        if level:
            numba.config.CPU_NAME, numba.config.CPU_FEATURES = level, ""


def processor() -> str:
    """For which code is compiled."""
    return str(numba.config.CPU_NAME or llvmlite.binding.get_host_cpu_name())


class Kept(NullCache):  # type: ignore[misc]
    """What numba asks for machine code of one function, and gives what it has compiled."""

    def __init__(self, function: FunctionType) -> None:
        self._source = Path(function.__code__.co_filename)
        self._name = f"{self._source.stem}-{function.__qualname__.replace('<locals>.', '')}"

    def load_overload(self, signature: Any, target: Any) -> Any:
        target.refresh()
        name = self._version(target.codegen()) + _types(signature)
        for place in places(self._source):
            content = _read(place / name)
            if content is not None:
                return CompileResult._rebuild(target, *loads(content))
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        if result.library.has_dynamic_globals:
            raise TypeError(f"{self._name} refers to memory of this process")
        version, content = self._version(result.codegen), dumps(result._reduce())
        for place in places(self._source):
            try:
                place.mkdir(parents=True, exist_ok=True)
                _write(place / (version + _types(signature)), content)
                self._remove_others(place, version)
            except OSError as error:
                _warn_once(f"machine code is not kept in {place}: {error.strerror}")
            else:
                return

    def _version(self, codegen: Any) -> str:
        """The name of a file, but for the types."""
        target = codegen.magic_tuple()
        text = repr((target, sources(self._source)))
        return f"{self._name}.{target[1]}.{hashlib.sha256(text.encode()).hexdigest()[:16]}."

    def _remove_others(self, place: Path, version: str) -> None:
        """What other versions left for such a processor."""
        processor = version.split(".")[1]
        for path in place.glob(f"{self._name}.{processor}.*.loop"):
            if not path.name.startswith(version):
                path.unlink(missing_ok=True)


def dumps(content: Any) -> bytes:
    """For this machine's own disk and processes, as numba writes it: never read what a peer has sent."""
    written: bytes = serialize.dumps(content)
    return written


def loads(written: bytes) -> Any:
    return pickle.loads(written)


def _types(signature: Any) -> str:
    return hashlib.sha256(str(signature).encode()).hexdigest()[:16] + ".loop"


@cache
def sources(own: Path) -> str:
    """A digest of what machine code follows from: all sources of this package, a function's own, and the versions."""
    digest = hashlib.sha256(repr((sys.version, numba.__version__, llvmlite.__version__)).encode())
    for path in sorted({*PACKAGE.rglob("*.py"), own}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def places(source: Path) -> Iterator[Path]:
    """Directories, the preferred first."""
    if numba.config.CACHE_DIR:
        yield Path(numba.config.CACHE_DIR)
    yield source.parent / "__pycache__"
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    if own.is_absolute():
        yield own / "murmur"


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None  # it is not there, or not for us: the next place, or compiled anew
    if hashlib.sha256(content[DIGEST:]).digest() == content[:DIGEST]:
        return content[DIGEST:]
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

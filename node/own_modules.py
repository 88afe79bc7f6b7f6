"""Modules of the user with components of a method, or with tasks: those that this machine may import, and is sure of.

A manifest names a module and the SHA-256 of its source, and gives no permission: this machine imports a module only if
its user allows it, by `--import`, by the variable MURMUR_IMPORT, or by a package that is installed and has an entry
point of the group `murmuration.components`. Nothing is fetched. Processes that a node starts inherit the variable, so a
trainer imports the same files as its daemon, and compares them with the manifest too.
"""

import functools
import hashlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from protocol.errors import ComponentError
from protocol.manifest.run import Manifest
from protocol.scored_tasks import tasks_in

if TYPE_CHECKING:
    from optim.compose import Registry

VARIABLE: Final = "MURMUR_IMPORT"
GROUP: Final = "murmuration.components"
SHOWN_DIGITS: Final = 12


@dataclass(frozen=True)
class ModuleSource:
    """A module by the name that manifests use, and its source: a file, or the folder of a package."""

    name: str
    path: Path

    def digest(self) -> str:
        """Return the SHA-256 of the file, or of the names and contents of all Python files of the package."""
        if self.path.is_file():
            return hashlib.sha256(_read(self.path)).hexdigest()
        digest = hashlib.sha256()
        for path in sorted(self.path.rglob("*.py")):
            name, content = path.relative_to(self.path).as_posix().encode(), _read(path)
            digest.update(b"%d %d\0%b%b" % (len(name), len(content), name, content))
        return digest.hexdigest()

    @property
    def line(self) -> str:
        """Return how a manifest names the module: `NAME SHA256`."""
        return f"{self.name} {self.digest()}"


def allow_modules(given: Sequence[str]) -> tuple[ModuleSource, ...]:
    """Let this process, and those that it starts, import modules: files that end in .py, or names.

    Raises ComponentError for one that is not there.
    """
    sources = tuple(find_module(each) for each in given)
    words = (str(source.path) if _is_file_name(word) else word for word, source in zip(given, sources, strict=True))
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*_allowed_words(), *words]))
    return sources


def find_module(given: str) -> ModuleSource:
    """Find the source of a module. Raises ComponentError."""
    if _is_file_name(given):
        path = Path(given).resolve()
        if not path.is_file():
            raise ComponentError(f"--import: there is no file {given}; name a Python file, or an installed module")
        if not path.stem.isidentifier() or os.pathsep in str(path):
            raise ComponentError(f"--import: {given} cannot be the name of a module; rename it like own_method.py")
        return ModuleSource(path.stem, path)
    try:
        spec = importlib.util.find_spec(given)
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ComponentError(f"--import: no module {given} is installed; name its file, such as ./{given}.py")
    origin = Path(spec.origin)
    return ModuleSource(given, origin.parent if spec.submodule_search_locations else origin)


def with_modules(manifest: Manifest, given: Sequence[str]) -> Manifest:
    """Return a manifest that also names the modules of `--import`, which makes it another run."""
    more = (source.line for source in allow_modules(given))
    modules = tuple(dict.fromkeys((*manifest.method.modules, *more)))
    if modules == manifest.method.modules:
        return manifest
    return manifest.model_copy(update={"method": manifest.method.model_copy(update={"modules": modules})})


def complete_line(line: str) -> str:
    """Return a line of `method.modules` with the digest of this machine's source, if it has none yet."""
    return line if " " in line or not line else _allowed_source(line, "").line


def own_registry(lines: Sequence[str]) -> "Registry":
    """Return the kinds of all components, with those of the modules that a manifest names.

    Raises ComponentError if a module may not be imported here, is not the run's, or cannot be used.
    """
    from optim.compose import extend_registry, find_components  # loads torch
    from optim.errors import OptimError

    modules = [load_module(line) for line in lines]
    others = [module for module in modules if any(find_components(module)) or not any(tasks_in(module))]
    try:
        return extend_registry(others)
    except OptimError as error:
        raise ComponentError(str(error)) from error


@functools.lru_cache(maxsize=64)  # a process keeps what it has imported, also if the file changes meanwhile
def load_module(line: str) -> ModuleType:
    """Import a module that a manifest names with the digest of its source. Raises ComponentError as `own_registry`."""
    name, digest = line.split(" ")
    source = _allowed_source(name, digest)
    found = source.digest()
    if found != digest:
        raise ComponentError(
            f"the run needs the module {name} with SHA-256 {digest[:SHOWN_DIGITS]}..., and {source.path} has "
            f"{found[:SHOWN_DIGITS]}...; get the run's file from its organiser"
        )
    return _import(source)


def _allowed_source(name: str, digest: str) -> ModuleSource:
    words = [*_allowed_words(), *(point.module for point in entry_points(group=GROUP))]
    for word in words:
        if name == (Path(word).stem if _is_file_name(word) else word):
            return find_module(word)
    which = f" with SHA-256 {digest[:SHOWN_DIGITS]}..." if digest else ""
    raise ComponentError(
        f"the run needs the module {name}{which}, which murmur never fetches: get its file from the organiser, read "
        f"it, and add {import_flag(name)}"
    )


def import_flag(line: str) -> str:
    """Return the option that allows a module of a manifest, as a file in the working directory."""
    return f"--import {line.partition(' ')[0].rpartition('.')[2]}.py"


def _allowed_words() -> list[str]:
    return [word for word in os.environ.get(VARIABLE, "").split(os.pathsep) if word]


def _import(source: ModuleSource) -> ModuleType:
    """Run the source under its name. Raises ComponentError with the line of a fault in it."""
    is_file = source.path.is_file()
    file = source.path if is_file else source.path / "__init__.py"
    known = sys.modules.get(source.name)
    if known is not None:
        if Path(getattr(known, "__file__", None) or "").resolve() == file.resolve():
            return known
        raise ComponentError(f"{source.path}: another module is called {source.name} already; rename the file")
    folders = None if is_file else [str(source.path)]
    spec = importlib.util.spec_from_file_location(source.name, file, submodule_search_locations=folders)
    assert spec is not None and spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[source.name] = module
    try:
        if is_file:  # not by the loader, whose compiled file may be that of an edit within the same second
            exec(compile(_read(file), str(file), "exec", dont_inherit=True), vars(module))
        else:
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[source.name]
        raise ComponentError(f"{file} cannot be imported: {type(error).__name__}: {_one_line(error)}") from error
    return module


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _is_file_name(word: str) -> bool:
    return word.endswith(".py")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ComponentError(f"cannot read {path}: {error.strerror}; name another file") from error

"""The sources that a kernel is compiled from, and the files of its machine code, which are named after them.

The digest in a file's name covers the kernel's body and the functions, constants and classes of this package that it
mentions, directly or through others. So an edit compiles again only the kernels that it concerns; numba alone would
miss an edit in a function that a kernel calls from another file.
"""

import ast
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

PACKAGE: Final = Path(__file__).parents[1]
DIGEST_SIZE: Final = 16  # hexadecimal digits
WHOLE_MODULE: Final = "*"  # as a name: all statements
Definition = tuple[str, str]  # module, name
Place = tuple[str, str, str]  # module, file, name


class KernelFiles:
    """Where numba keeps the machine code of one kernel: a locator of its cache (NUMBA_CACHE_LOCATOR_CLASSES).

    It declines functions of other packages, which numba then stores as usual.
    """

    kernels: Final[set[Callable[..., Any]]] = set()
    directory: Path | None = None

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        self._py_file = file  # numba shows it in its warnings
        self._name = function.__qualname__
        self._folder = str((self.directory or Path()) / function.__module__)
        self._digest = kernel_digest(function.__module__, file, function.__name__)

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> "KernelFiles | None":
        return cls(function, file) if function in cls.kernels else None

    def get_cache_path(self) -> str:
        return self._folder

    def get_source_stamp(self) -> str:
        return self._digest

    def get_disambiguator(self) -> str:
        return self._digest

    def ensure_cache_path(self) -> None:
        """Create the folder before a kernel is stored, and remove what was compiled from other sources of it."""
        folder = Path(self._folder)
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.nb[ic]"):
            name, _, rest = path.name.partition("-")
            if name.endswith(f".{self._name}") and not rest.startswith(self._digest):
                path.unlink(missing_ok=True)


def kernel_digest(module: str, file: str, name: str) -> str:
    """Return a digest of the sources that a kernel is compiled from."""
    digest = hashlib.sha256()
    for definition, text in sorted(kernel_sources(module, file, name).items()):
        digest.update(repr((definition, text)).encode())
    return digest.hexdigest()[:DIGEST_SIZE]


def kernel_sources(module: str, file: str, name: str) -> dict[Definition, str]:
    """Return all definitions of this package that a kernel is compiled from, each as text."""
    found: dict[Definition, str] = {}
    pending = [(module, file, name)]
    while pending:
        module, file, name = pending.pop()
        if (module, name) not in found:
            found[module, name], mentioned = _read_source(module, file).read(name)
            pending += mentioned
    return found


class _ModuleSource:
    """The definitions of one module by name, and those of this package that each of them mentions."""

    def __init__(self, module: str, file: str) -> None:
        self._module, self._file = module, file
        self._statements: dict[str, list[ast.stmt]] = defaultdict(list)
        self._imports: dict[str, Definition] = {}
        text = Path(file).read_text()
        self._lines = text.splitlines()
        for statement in ast.parse(text).body:
            if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
                self._note_imports(statement)
            for name in (*_defined_names(statement), WHOLE_MODULE):
                self._statements[name].append(statement)
        self._read: dict[str, tuple[str, list[Place]]] = {}

    def read(self, name: str) -> tuple[str, list[Place]]:
        """Return a definition as text, and where the definitions are that it mentions."""
        if name not in self._read:
            statements = self._statements.get(name, [])
            nodes = [node for statement in statements for node in ast.walk(statement)]
            names = {name, *(node.id for node in nodes if isinstance(node, ast.Name))}  # the module may only import it
            mentioned = [place for each in names for place in self._find(each)]
            self._read[name] = "\n".join(map(self._text, statements)), mentioned
        return self._read[name]

    def _note_imports(self, statement: ast.stmt) -> None:
        for node in ast.walk(statement):
            if isinstance(node, ast.ImportFrom):
                self._imports |= {item.asname or item.name: (str(node.module), item.name) for item in node.names}
            elif isinstance(node, ast.Import):
                self._imports |= {item.asname or PACKAGE.name: (item.name, WHOLE_MODULE) for item in node.names}

    def _text(self, statement: ast.stmt) -> str:
        decorators = getattr(statement, "decorator_list", [])
        first = min(part.lineno for part in (statement, *decorators))
        return "\n".join(self._lines[first - 1 : statement.end_lineno])

    def _find(self, name: str) -> Iterator[Place]:
        if name in self._statements:
            yield self._module, self._file, name
        elif name in self._imports:
            yield from _locate(*self._imports[name])


def _locate(module: str, name: str) -> Iterator[Place]:
    """Yield module, file and name of an imported definition, unless another package has it."""
    if module.split(".")[0] != PACKAGE.name:
        return
    if file := _file_of(f"{module}.{name}"):
        yield f"{module}.{name}", file, WHOLE_MODULE
    elif file := _file_of(module):
        yield module, file, name


def _file_of(module: str) -> str | None:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return next((str(file) for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _defined_names(statement: ast.stmt) -> set[str]:
    """Return the names that a statement may define or change; too many only compile a kernel once more."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return set()
    parts: list[ast.AST] = [statement]
    if isinstance(statement, ast.Assign):
        parts = [*statement.targets]
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        parts = [statement.target]
    nodes = [node for part in parts for node in ast.walk(part)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@cache
def _read_source(module: str, file: str) -> _ModuleSource:
    return _ModuleSource(module, file)

"""Check that the package requires what it imports when it starts, and names in an extra what it imports later."""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = ("node", "protocol", "optim", "murmuration")
INDIRECT = {"llvmlite", "pydantic_core", "pyarrow", "tqdm"}  # come with numba, pydantic, datasets and transformers
NAMED_IN_MESSAGES = {"transformers"}  # a user of its Trainer has it
FOR_DEVELOPERS = {"test", "docs"}  # extras that no command needs
OPTIONAL = {"node/commands/eval/harness.py", "murmuration/hugging_face.py"}  # imported where their packages are


def imported_packages(source: str) -> Iterator[str]:
    """Yield the packages that a module imports while it is imported, and not later or for its types only."""
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield (statement.module or "").partition(".")[0]


def find_missing(sources: dict[str, str], dependencies: list[str]) -> dict[str, str]:
    """Return the packages that are imported and not required, each with a module that imports it."""
    required = {re.split(r"[\[<>=~!; ]", line)[0].lower().replace("_", "-") for line in dependencies}
    known = {*sys.stdlib_module_names, *OURS, *INDIRECT}
    distributions = known_distributions()
    missing: dict[str, str] = {}
    for name in sources.keys() - OPTIONAL:
        for package in imported_packages(sources[name]):
            offered = {each.lower().replace("_", "-") for each in distributions.get(package, ())}
            if package not in known and required.isdisjoint(offered):
                missing[package] = name
    return missing


def read_sources() -> dict[str, str]:
    files = [file for package in OURS for file in (ROOT / package).rglob("*.py")]
    return {str(file.relative_to(ROOT)): file.read_text() for file in files}


def imported_anywhere(source: str) -> Iterator[str]:
    """Yield the packages that a module imports, also inside of functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]


@functools.cache
def imported_by_the_product() -> set[str]:
    return {package for source in read_sources().values() for package in imported_anywhere(source)}


@functools.cache
def known_distributions() -> Mapping[str, list[str]]:
    return packages_distributions()


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=~!; ]", requirement)[0].lower().replace("_", "-")


def distributions_of(packages: set[str]) -> set[str]:
    """Return the names on the index of what is imported; a package that is not installed has its own name."""
    known = known_distributions()
    return {name.lower().replace("_", "-") for package in packages for name in known.get(package, [package])}


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_dependency_is_imported_by_the_product() -> None:
    """What only tests or builds need is in an extra."""
    imported = imported_by_the_product()
    used = distributions_of(imported)
    assert {name_of(line) for line in PROJECT["dependencies"]} - used == set()
    assert not {"pytest", "hatchling", "grpcio-tools", "mkdocs-material"} & used, "the control: tests import others"


def test_extras_name_what_is_imported_later() -> None:
    extras = [
        line for name, lines in PROJECT["optional-dependencies"].items() if name not in FOR_DEVELOPERS for line in lines
    ]
    offered = {name_of(line) for line in (*PROJECT["dependencies"], *extras)}
    imported = imported_by_the_product()
    theirs = imported - {*sys.stdlib_module_names, *OURS, *INDIRECT, *NAMED_IN_MESSAGES, "__future__"}
    assert distributions_of(theirs) - offered == set()
    assert distributions_of(theirs) - (offered - {"tokenizers"}) == {"tokenizers"}, "the control"


def test_everything_that_is_imported_is_required() -> None:
    sources, dependencies = read_sources(), PROJECT["dependencies"]
    assert find_missing(sources, dependencies) == {}
    without = [line for line in dependencies if not line.startswith("psutil")]
    assert find_missing(sources, without).keys() == {"psutil"}, "the control"

"""Check that the package requires everything that it imports when it starts."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = ("node", "protocol", "optim", "murmuration")
INDIRECT = {"llvmlite", "pydantic_core"}  # come with numba and pydantic
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
    distributions = packages_distributions()
    missing: dict[str, str] = {}
    for name in sources.keys() - OPTIONAL:
        for package in imported_packages(sources[name]):
            offered = {each.lower().replace("_", "-") for each in distributions.get(package, ())}
            if package not in known and required.isdisjoint(offered):
                missing[package] = name
    return missing


def test_everything_that_is_imported_is_required() -> None:
    files = [file for package in OURS for file in (ROOT / package).rglob("*.py")]
    sources = {str(file.relative_to(ROOT)): file.read_text() for file in files}
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert find_missing(sources, dependencies) == {}
    without = [line for line in dependencies if not line.startswith("psutil")]
    assert find_missing(sources, without).keys() == {"psutil"}, "the control"

"""An edit compiles again the kernels that it concerns, and no others."""

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.extending import is_jitted

import optim.kernels.warmup  # noqa: F401  imports all modules with kernels
from optim.kernels import sources
from optim.kernels.sources import kernel_digest, kernel_sources

MODULES = {
    "kernels/__init__.py": "",
    "codecs/__init__.py": "",
    "codecs/blocks.py": """
from optim.codecs.bits import SHIFT as BITS, round_up
import optim.codecs.tables as tables

LIMIT = BITS + 1

@kernel
def encode(values):
    return helper(values) + round_up(values) + tables.SIZES[0]

@kernel
def decode(values):
    return values

@subroutine
def helper(values):
    return values * LIMIT

def describe():
    return "blocks"
""",
    "codecs/bits.py": """
SHIFT = base() + 3
UNUSED = 4

def base():
    return 1

def round_up(values):
    return values
""",
    "codecs/tables.py": """
SIZES = [1, 2]
SIZES[1] = 5
""",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "optim"
    monkeypatch.setattr(sources, "PACKAGE", root)
    for name, text in MODULES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def digest(root: Path, name: str) -> str:
    sources._read_source.cache_clear()
    return kernel_digest("optim.codecs.blocks", str(root / "codecs/blocks.py"), name)


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("codecs/blocks.py", "helper(values) +", "helper(values) -"),  # the kernel itself
        ("codecs/blocks.py", "@kernel\ndef encode", "@kernel(fastmath=True)\ndef encode"),
        ("codecs/blocks.py", "values * LIMIT", "values / LIMIT"),  # a subroutine of its module
        ("codecs/blocks.py", "BITS + 1", "BITS + 2"),  # a constant that only the subroutine uses
        ("codecs/bits.py", "return values", "return -values"),  # a subroutine of another module
        ("codecs/bits.py", "+ 3", "+ 5"),  # a constant of another module, under another name
        ("codecs/bits.py", "return 1", "return 2"),  # a function that computes the constant
        ("codecs/tables.py", "[1, 2]", "[2, 2]"),  # a module that is imported as a whole
        ("codecs/tables.py", "= 5", "= 6"),  # a table that is filled later
    ],
)
def test_edit_of_a_kernel_or_of_what_it_uses_changes_its_digest(
    package: Path, file: str, before: str, after: str
) -> None:
    first, others = digest(package, "encode"), digest(package, "decode")
    text = (package / file).read_text()
    assert text.count(before) == 1
    (package / file).write_text(text.replace(before, after))
    assert digest(package, "encode") != first
    assert digest(package, "decode") == others


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("codecs/blocks.py", '"blocks"', '"other blocks"'),  # a function that no kernel calls
        ("codecs/blocks.py", "def decode(values):\n    return values", "def decode(values):\n    return -values"),
        ("codecs/bits.py", "UNUSED = 4", "UNUSED = 5"),
        ("kernels/__init__.py", "", "SHIFT = 7"),
    ],
)
def test_edit_elsewhere_keeps_the_digest(package: Path, file: str, before: str, after: str) -> None:
    first = digest(package, "encode")
    text = (package / file).read_text()
    (package / file).write_text(text.replace(before, after) if before else after)
    assert digest(package, "encode") == first


def all_kernels() -> Iterator[Any]:
    for name, module in list(sys.modules.items()):
        if name.startswith("optim."):
            yield from (item for item in vars(module).values() if is_jitted(item) and item.py_func.__module__ == name)


def test_digest_covers_all_that_each_kernel_uses_as_python_sees_it() -> None:
    """The digest reads sources, because a kernel is defined before the functions below it exist; compare both views."""
    compared = 0
    for kernel in all_kernels():
        pending, seen = [kernel.py_func], set()
        known = kernel_sources(kernel.py_func.__module__, inspect.getfile(kernel.py_func), kernel.py_func.__name__)
        while pending:
            function = pending.pop()
            for name in set(function.__code__.co_names) & function.__globals__.keys():
                used = function.__globals__[name]
                if is_jitted(used) and used not in seen:
                    seen.add(used)
                    pending.append(used.py_func)
                    assert (used.py_func.__module__, used.py_func.__name__) in known
                elif isinstance(used, int | float | tuple | np.ndarray | np.generic):
                    assert any(definition[1] == name and text for definition, text in known.items()), name
                    compared += 1
        compared += len(seen)
    assert compared > 100


CALL = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy
from numba.extending import is_jitted
import kernels_of_a_test as own
assert own.double(numpy.ones(2)) == own.FACTOR * 2.0
kernels = [item for item in vars(own).values() if is_jitted(item) and item.stats.cache_path]
print(sum(sum(kernel.stats.cache_misses.values()) for kernel in kernels))
"""
KERNELS = """
from optim.kernels.jit import kernel, subroutine
FACTOR = 1.0

@kernel
def double(values):
    return values.sum() * times()

@subroutine
def times():
    return FACTOR
"""


@pytest.mark.slow
def test_machine_code_of_an_older_source_is_neither_used_nor_kept(tmp_path: Path) -> None:
    """Control: an edit that no kernel sees compiles nothing."""
    cache, file = tmp_path / "cache", tmp_path / "kernels_of_a_test.py"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)}

    def compiled(text: str) -> int:
        file.write_text(text)
        command = [sys.executable, "-W", "error", "-c", CALL, str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert [compiled(KERNELS), compiled(KERNELS)] == [1, 0]
    (first,) = cache.rglob("*.nbc")
    assert compiled(KERNELS + "\nNAME = 1\n") == 0
    assert compiled(KERNELS.replace("1.0", "3.0")) == 1
    (second,) = cache.rglob("*.nbc")
    assert first != second

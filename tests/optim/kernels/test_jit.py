"""Kernels round as their source says, release the interpreter, and are compiled once for later processes."""

import os
import platform
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest
import torch
from llvmlite import binding as llvm

from optim.codecs import blocks, floats, int_blocks
from optim.codecs.base import Codec
from optim.codecs.floats import Float16
from optim.codecs.int_blocks import BlockInt8
from optim.kernels import jit
from optim.kernels.jit import OPTIONS, bits_to_float, cache_directory, float_to_bits, kernel

pytestmark = pytest.mark.slow

Floats = npt.NDArray[np.float32]


@kernel
def add_product(total: Floats, values: Floats, factor: np.float32) -> None:
    for place in range(total.size):
        total[place] += values[place] * factor


def test_product_is_rounded_before_it_is_added() -> None:
    generator = np.random.default_rng(0)
    total, values = generator.standard_normal((2, 10_000)).astype(np.float32)
    factor = np.float32(0.7310586)
    expected = total + values * factor
    in_one_step = (total.astype(np.float64) + values.astype(np.float64) * np.float64(factor)).astype(np.float32)
    add_product(total, values, factor)
    assert np.array_equal(total, expected)
    assert not np.array_equal(total, in_one_step)  # the control: a fused step would have been seen


IS_X86 = platform.machine() == "x86_64"
FUSED = "vfmadd" if IS_X86 else "fmadd"


def assembly(loop: Any, **options: Any) -> str:
    """Compile a kernel again for the arguments that it was last called with, and return its assembly."""
    again = numba.njit(**OPTIONS, **options)(loop.py_func)
    again.compile(loop.signatures[-1])
    (text,) = again.inspect_asm().values()
    return str(text)


@pytest.mark.skipif(IS_X86 and not llvm.get_host_cpu_features().get("fma"), reason="a processor without fused steps")
@pytest.mark.parametrize(
    ("codec", "loop"),
    [
        (BlockInt8(), blocks._add_products),
        (BlockInt8(rounding="stochastic"), int_blocks._encode_stochastic),
        (Float16(), floats._add_float16),
    ],
    ids=["a sum", "noise", "half precision"],
)
def test_codecs_hold_no_fused_step(codec: Codec, loop: Any) -> None:
    codec.decode_vector(codec.encode(torch.ones(100)), 100).add_to(np.zeros(100, np.float32), 0.3)
    assert FUSED not in assembly(loop)
    assert FUSED in assembly(loop, fastmath={"contract"})  # the control: there is one to be had


@kernel
def flip_signs(values: Floats) -> None:
    for i in range(values.size):
        values[i] = bits_to_float(np.uint32(float_to_bits(values[i]) ^ np.uint32(1 << 31)))


def test_numbers_are_converted_to_bits_and_back() -> None:
    values = np.array([0.0, 1.5, -(2.0**-149), np.inf], np.float32)
    flip_signs(values)
    assert values.tobytes() == np.array([-0.0, -1.5, 2.0**-149, -np.inf], np.float32).tobytes()


@kernel
def squares(count: int, size: int) -> int:
    """Allocate memory in the kernel again and again."""
    total = 0
    for number in range(count):
        own = np.zeros(size, np.int64)
        own[number % size] = number * number
        total += own.sum()
    return total


def test_memory_of_a_kernel_is_freed() -> None:
    assert squares(1, 1 << 17) == 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert squares(1000, 1 << 17) == sum(number * number for number in range(1000))  # a gigabyte in all
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_memory_that_a_kernel_cannot_get_is_an_error() -> None:
    with pytest.raises(MemoryError):
        squares(1, 1 << 50)


def test_kernel_releases_the_interpreter() -> None:
    squares(1, 1 << 17)
    turns, done = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1

    other = threading.Thread(target=count)
    other.start()
    before = turns
    squares(2000, 1 << 17)
    done.set()
    other.join()
    assert turns - before > 1000


CALL = """
import numpy
from optim.kernels.vectors import _add_squares
sums = numpy.zeros(3)
_add_squares(numpy.full(3, 2, "f"), sums)
assert sums.tolist() == [4, 4, 4]
print(sum(_add_squares.stats.cache_misses.values()))
"""


def compiled_by(cache: Path, home: Path, ready: str = "") -> int:
    """Call a kernel in a new process, and return how many times it was compiled."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "XDG_CACHE_HOME": str(home)}
    command = [sys.executable, "-W", "error", "-c", ready + CALL]
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout)


def test_kernel_is_compiled_once_for_later_processes(tmp_path: Path) -> None:
    assert [compiled_by(tmp_path, tmp_path) for _ in range(2)] == [1, 0]
    assert len(list(tmp_path.rglob("*.nbc"))) == 1


def test_kernel_is_compiled_where_no_cache_can_be_written(tmp_path: Path) -> None:
    closed = tmp_path / "file"
    closed.write_text("not a directory")
    nothing = "import pathlib; pathlib.Path.mkdir = lambda *a, **k: (_ for _ in ()).throw(PermissionError())\n"
    assert [compiled_by(closed, closed, nothing) for _ in range(2)] == [1, 1]


def test_processes_that_compile_at_the_same_time_do_not_harm_each_other(tmp_path: Path) -> None:
    counts = list[int]()
    threads = [threading.Thread(target=lambda: counts.append(compiled_by(tmp_path, tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 3 and compiled_by(tmp_path, tmp_path) == 0
    assert len(list(tmp_path.rglob("*.nbc"))) == 1


def test_cache_is_in_the_first_place_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, home = tmp_path / "package", tmp_path / "home"
    package.mkdir()
    monkeypatch.setattr(jit, "PACKAGE", package)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    found = cache_directory()
    assert found is not None and found.parent == package / "__pycache__"
    found.rmdir()
    found.parent.rmdir()
    (package / "__pycache__").write_text("not a directory")
    found = cache_directory()
    assert found is not None and found.parent == home / "murmur"
    for useless in (str(package / "__pycache__"), "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", useless)
        assert cache_directory() is None


def test_each_kind_of_processor_has_a_cache_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    own = cache_directory()
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: "another")
    other = cache_directory()
    assert own is not None and other is not None and own != other and own.exists()

"""Machine code that rounds as its source says."""

import platform
import resource
import threading
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch

from optim.codecs import blocks, floats, int_blocks
from optim.codecs.base import Codec
from optim.codecs.floats import Float16
from optim.codecs.int_blocks import BlockInt8
from optim.kernels.code_cache import processor, target_machine
from optim.kernels.compiler import build_module
from optim.kernels.jit import bits_to_float, float_to_bits, jit

Floats = npt.NDArray[np.float32]


@jit
def add_product(total: Floats, values: Floats, factor: np.float32) -> None:
    for place in range(total.size):
        total[place] += values[place] * factor


def test_a_product_is_rounded_before_it_is_added() -> None:
    generator = np.random.default_rng(0)
    total, values = generator.standard_normal((2, 10_000)).astype(np.float32)
    factor = np.float32(0.7310586)
    expected = total + values * factor
    in_one_step = (total.astype(np.float64) + values.astype(np.float64) * np.float64(factor)).astype(np.float32)
    add_product(total, values, factor)
    assert np.array_equal(total, expected)
    assert not np.array_equal(total, in_one_step)  # the control: a fused step would have been seen


FUSED = "vfmadd" if platform.machine() == "x86_64" else "fmadd"


def assembly(loop: Any, **options: Any) -> str:
    """Of the last kinds of arguments that it was called with."""
    text: str = target_machine().emit_assembly(build_module(loop.function, loop.signatures[-1], **options))
    return text


@pytest.mark.skipif(processor() == "x86-64-v2", reason="a processor without fused steps")
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


@jit
def there_and_back(values: Floats) -> None:
    for i in range(values.size):
        values[i] = bits_to_float(np.uint32(float_to_bits(values[i]) ^ np.uint32(1 << 31)))


def test_bits_of_numbers_are_had_and_made() -> None:
    values = np.array([0.0, 1.5, -(2.0**-149), np.inf], np.float32)
    there_and_back(values)
    assert values.tobytes() == np.array([-0.0, -1.5, 2.0**-149, -np.inf], np.float32).tobytes()


@jit
def kinds_of_numbers(values: Floats, whole: int, truth: bool, real: float, word: np.uint32) -> int:
    return int(values[0]) + whole + (1 if truth else 0) + int(real) + int(word)


def test_numbers_of_all_kinds_go_in_and_a_whole_one_comes_out() -> None:
    assert kinds_of_numbers(np.array([2], np.float32), 1 << 40, True, -3.5, np.uint32(1 << 31)) == (
        2 + (1 << 40) + 1 - 3 + (1 << 31)
    )


@jit
def summed(rows: Floats) -> int:
    total = np.float32(0)
    for row in range(rows.shape[0]):
        for place in range(rows.shape[1]):
            total += rows[row, place]
    return int(total)


def test_arrays_have_their_values_one_after_the_other() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert summed(rows) == 66 and summed(rows[1:]) == 60 and summed(rows[:0]) == 0
    for scattered in (rows[:, :2], rows.T, np.frombuffer(b"x" * 17, np.uint8)[1:].view(np.float32).reshape(2, 2)):
        with pytest.raises(ValueError, match="one after the other"):
            summed(scattered)


@jit
def squares(count: int, size: int) -> int:
    """With memory of its own, over and over."""
    total = 0
    for number in range(count):
        own = np.zeros(size, np.int64)
        own[number % size] = number * number
        total += own.sum()
    return total


def test_memory_within_a_loop_is_given_back() -> None:
    assert squares(1, 1 << 17) == 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert squares(1000, 1 << 17) == sum(number * number for number in range(1000))  # a gigabyte in all
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_memory_that_cannot_be_had_is_an_error() -> None:
    with pytest.raises(MemoryError, match="squares"):
        squares(1, 1 << 60)


def test_a_loop_leaves_the_interpreter_to_others() -> None:
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


def test_code_needs_nothing_of_the_compilers() -> None:
    module = build_module(cast(Any, squares).function, (("int64", 0), ("int64", 0)))
    needed = {function.name for function in module.functions if function.is_declaration}
    assert {name for name in needed if not name.startswith("llvm.")} <= {"malloc", "free", "memset", "memcpy"}
    assert not [variable.name for variable in module.global_variables if variable.is_declaration]

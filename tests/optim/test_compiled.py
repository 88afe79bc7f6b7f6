"""Machine code that rounds as its source says."""

import platform
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest
import torch

from optim.codecs import blocks, dense, integers
from optim.codecs.codec import Codec
from optim.codecs.dense import HalfPrecision
from optim.codecs.integers import BlockInt8
from optim.compiled import bits_of, compiled, float_of
from optim.machine_code import processor

Floats = npt.NDArray[np.float32]


@compiled
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
    """Of the last signature that it was called with, compiled here and now."""
    fresh = numba.njit(nogil=True, error_model="numpy", **options)(loop.py_func)
    fresh.compile(loop.signatures[-1])
    return "".join(fresh.inspect_asm().values())


@pytest.mark.skipif(processor() == "x86-64-v2", reason="a processor without fused steps")
@pytest.mark.parametrize(
    ("codec", "loop"),
    [
        (BlockInt8(), blocks._add_products),
        (BlockInt8(rounding="stochastic"), integers._drawn),
        (HalfPrecision(), dense._add_halves),
    ],
    ids=["a sum", "noise", "half precision"],
)
def test_codecs_hold_no_fused_step(codec: Codec, loop: Any) -> None:
    codec.read(codec.encode(torch.ones(100)), 100).add_to(np.zeros(100, np.float32), 0.3)
    assert FUSED not in assembly(loop)
    assert FUSED in assembly(loop, fastmath={"contract"})  # the control: there is one to be had


@compiled
def there_and_back(values: Floats) -> None:
    for i in range(values.size):
        values[i] = float_of(np.uint32(bits_of(values[i]) ^ np.uint32(1 << 31)))


def test_bits_of_numbers_are_had_and_made() -> None:
    values = np.array([0.0, 1.5, -(2.0**-149), np.inf], np.float32)
    there_and_back(values)
    assert values.tobytes() == np.array([-0.0, -1.5, 2.0**-149, -np.inf], np.float32).tobytes()

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optim.kernels.vectors import exp, power


@given(st.floats(-500, 500))
def test_exp_is_correctly_rounded(value: float) -> None:
    assert exp(value) == pytest.approx(math.exp(value), rel=1e-15)


@given(st.integers(1, 100), st.floats(-10, 10))
def test_powers(base: int, exponent: float) -> None:
    assert power(base, exponent) == pytest.approx(math.pow(base, exponent), rel=1e-14)


def test_values_are_pinned_to_the_last_bit() -> None:
    """A C library may differ in the last place, these functions may not."""
    assert exp(-1.0).hex() == "0x1.78b56362cef38p-2"
    assert power(3, -0.5).hex() == "0x1.279a74590331cp-1"
    assert power(7, 0.0) == exp(0.0) == 1.0

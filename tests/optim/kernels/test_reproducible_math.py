import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optim.kernels.reproducible_math import exp, power


@given(st.floats(-500, 500))
def test_the_exponential_is_the_nearest_number(value: float) -> None:
    assert exp(value) == pytest.approx(math.exp(value), rel=1e-15)


@given(st.integers(1, 100), st.floats(-10, 10))
def test_powers(base: int, exponent: float) -> None:
    assert power(base, exponent) == pytest.approx(math.pow(base, exponent), rel=1e-14)


def test_to_the_last_bit() -> None:
    """Pinned: a C library may be off by one in the last place, these not."""
    assert exp(-1.0).hex() == "0x1.78b56362cef38p-2"
    assert power(3, -0.5).hex() == "0x1.279a74590331cp-1"
    assert power(7, 0.0) == exp(0.0) == 1.0

"""Machine code that rounds as its source says."""

import numpy as np
import numpy.typing as npt

from optim.compiled import compiled

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

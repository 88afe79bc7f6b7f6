import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.codecs.bits.selection import select_largest

Array = npt.NDArray[np.float32]
DRAWS = ("normal", "few magnitudes", "all equal", "zeros", "one value", "tiny", "ascending", "runs")


def draw(kind: str, span: int, seed: int) -> Array:
    generator = np.random.default_rng(seed)
    normal = generator.standard_normal(span)
    values: dict[str, npt.NDArray[np.generic]] = {
        "normal": normal,
        "few magnitudes": generator.integers(-3, 4, span),
        "all equal": np.where(normal < 0, -1.5, 1.5),
        "zeros": np.where(normal < 0, -0.0, 0.0),
        "one value": np.arange(span) == seed % span,
        "tiny": normal * 1e-42,  # below fp32's normal numbers
        "ascending": np.arange(span),
        "runs": normal * (np.arange(span) // 8 % 16 == 3),
    }
    drawn: Array = values[kind].astype(np.float32)
    return drawn


def chosen(values: Array, keep: int) -> tuple[list[int], Array]:
    selected_positions, magnitudes = np.empty((2, values.size), np.uint32)
    assert select_largest(values.view(np.uint32), keep, selected_positions, magnitudes)
    return selected_positions[:keep].tolist(), magnitudes[:keep].view(np.float32)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(DRAWS), st.sampled_from([1, 2, 7, 64, 100, 1024, 4095, 4096]), st.data())
def test_selection_agrees_with_a_stable_sort(kind: str, span: int, data: st.DataObject) -> None:
    values = draw(kind, span, data.draw(st.integers(0, 2**32 - 1)))
    keep = data.draw(st.integers(1, span))
    selected_positions, magnitudes = chosen(values, keep)
    expected = np.sort(np.argsort(-np.abs(values), kind="stable")[:keep])
    assert selected_positions == expected.tolist()
    assert np.array_equal(magnitudes, np.abs(values[expected]))


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("keep", [1, 64, 100])
def test_values_that_are_not_finite_are_refused_at_any_position(bad: float, keep: int) -> None:
    for place in range(100):
        values = draw("normal", 100, 0)
        values[place] = bad
        assert not select_largest(values.view(np.uint32), keep, *np.empty((2, 100), np.uint32))

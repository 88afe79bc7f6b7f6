"""Which tests `make nightly` alone runs, and which every change must pass."""

from collections.abc import Iterable

import pytest


def nightly(values: Iterable[object]) -> list[object]:
    """Return parameters that `make nightly` alone tries; a tuple holds the values of several names."""
    rows = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*row, marks=pytest.mark.nightly) for row in rows]


def sliced(values: Iterable[object], count: int) -> list[object]:
    """Return parameters of which each change tries the first `count`, and `make nightly` all."""
    every = list(values)
    return [*every[:count], *nightly(every[count:])]

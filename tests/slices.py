"""Which tests `make nightly` alone runs, and which every change must pass."""

from collections.abc import Iterable

import pytest


def nightly(values: Iterable[object]) -> list[object]:
    """Return parameters that `make nightly` alone tries."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


def sliced(values: Iterable[object], count: int) -> list[object]:
    """Return parameters of which each change tries the first `count`, and `make nightly` all."""
    every = list(values)
    return [*every[:count], *nightly(every[count:])]

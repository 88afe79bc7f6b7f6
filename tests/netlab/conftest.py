"""These tests build networks; where that is not allowed, they say so and are skipped."""

from collections.abc import Iterator

import pytest

from tests.netlab.lab.laboratory import Laboratory
from tests.netlab.lab.namespaces import reason_unavailable


@pytest.fixture(scope="session")
def permitted() -> None:
    """Skips whatever asks for it where networks cannot be built."""
    reason = reason_unavailable()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def laboratory(permitted: None) -> Iterator[Laboratory]:
    with Laboratory() as made:
        yield made

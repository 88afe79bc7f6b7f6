"""The zygote that all tests of pipelines share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipelines.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[str]:
    temporary = tempfile.TemporaryDirectory(prefix="mm", dir="/tmp", ignore_cleanup_errors=True)
    with temporary as folder, Zygote(Path(folder)) as running:
        yield running.path

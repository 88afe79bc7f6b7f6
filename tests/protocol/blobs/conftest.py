"""A pool of blob sources with a downloader, stopped after each test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.protocol.blobs.fake_sources import SourcePool


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[SourcePool]:
    swarm = SourcePool(tmp_path)
    yield swarm
    await swarm.stop()

"""What the tests of gossip share."""

from collections.abc import AsyncIterator

import pytest

from tests.protocol.membership.gossiping import Swarm


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    swarm = Swarm()
    yield swarm
    await swarm.stop()

"""Fixtures shared by the gossip tests."""

from collections.abc import AsyncIterator

import pytest

from tests.protocol.membership.simulated_gossip import GossipSwarm


@pytest.fixture
async def swarm() -> AsyncIterator[GossipSwarm]:
    swarm = GossipSwarm()
    yield swarm
    await swarm.stop()

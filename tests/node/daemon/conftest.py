import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.node.daemon.loopback_network import LoopbackNetwork
from tests.node.daemon.state.checkpointer_setup import CheckpointerSetup
from tests.node.small_run import at_once


@pytest.fixture
async def tables(tmp_path: Path) -> AsyncIterator[list[LoopbackNetwork]]:
    made: list[LoopbackNetwork] = []
    yield made
    for table in made:
        for seat in table.peers.values():
            seat.stop()
            assert not seat.inbox.faults, f"{seat.inbox.faults}"
    await asyncio.sleep(0.02)
    fetchers = [seat.fetcher for table in made for seat in table.peers.values()]
    assert not any(fetcher.under_way for fetcher in fetchers), "a fetch outlived its round"


@pytest.fixture
async def table(tables: list[LoopbackNetwork], tmp_path: Path) -> LoopbackNetwork:
    tables.append(LoopbackNetwork(tmp_path, 3, "gather"))
    return tables[0]


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CheckpointerSetup]:
    monkeypatch.setattr(asyncio, "to_thread", at_once)
    made = CheckpointerSetup(tmp_path)
    yield made
    made.adopted.set()
    await made.keeper.wait_until_saved()
    made.arena.close()

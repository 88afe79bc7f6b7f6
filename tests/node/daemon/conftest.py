import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.node.daemon.kept import World
from tests.node.daemon.seats import Table


@pytest.fixture
async def tables(tmp_path: Path) -> AsyncIterator[list[Table]]:
    made: list[Table] = []
    yield made
    for table in made:
        for seat in table.seats.values():
            seat.driver.close()
            assert not seat.broken, f"{seat.broken}"
    await asyncio.sleep(0.02)
    fetchers = [seat.fetcher for table in made for seat in table.seats.values()]
    assert not any(fetcher.under_way for fetcher in fetchers), "a fetch outlived its round"


@pytest.fixture
def table(tables: list[Table], tmp_path: Path) -> Table:
    tables.append(Table(tmp_path, 3, "gather"))
    return tables[0]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    yield made
    made.adopted.set()
    await made.keeper.saved()
    made.arena.close()

"""The disk budget of a node's folder."""

import os
from pathlib import Path

import pytest

from node.disk_budget import DiskRoom, checkpoints_within, choose_budget, folder_bytes, watch_budget
from protocol.errors import StorageError


def test_checkpoints_are_fewer_rather_than_beyond_the_budget() -> None:
    assert checkpoints_within(budget=1000, used=300, stored=200, newest=100, keep=100) == 8
    assert checkpoints_within(budget=1000, used=300, stored=200, newest=100, keep=3) == 3
    assert checkpoints_within(budget=100, used=300, stored=200, newest=100, keep=100) == 1


def test_budget_is_half_of_what_the_folder_could_have_or_as_allowed(tmp_path: Path) -> None:
    assert choose_budget(tmp_path, 5000) == 5000
    (tmp_path / "blob").write_bytes(os.urandom(1 << 20))
    assert 1 << 20 <= folder_bytes(tmp_path) < 2 << 20
    assert choose_budget(tmp_path, None) > 0


def test_links_do_not_count(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(os.urandom(1 << 20))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(big)
    (folder / "self").symlink_to(folder)
    assert folder_bytes(folder) < 1 << 16


async def test_node_ends_when_its_folder_exceeds_the_budget(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(os.urandom(1 << 20))
    with pytest.raises(StorageError, match="--disk"):
        await watch_budget(tmp_path, 1 << 19)


async def test_states_for_others_take_a_quarter_of_the_budget_at_most_and_no_more_than_is_left(tmp_path: Path) -> None:
    (tmp_path / "own").write_bytes(os.urandom(600_000))
    room = DiskRoom(tmp_path, 1_000_000)
    await room.require(250_000)
    with pytest.raises(StorageError, match="--disk"):
        await room.require(260_000)
    (tmp_path / "more").write_bytes(os.urandom(200_000))
    with pytest.raises(StorageError, match="25% of it for others"):
        await room.require(250_000)

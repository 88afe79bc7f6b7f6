"""Wishes are new once, their sources change under way, and everybody is asked where nobody is named."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from node.daemon.wishes import PATIENCE, Wishes
from protocol.blobs.blob import Blob
from protocol.blobs.store import BlobStore
from protocol.errors import UnreachableError
from tests.node.small_run import CopyingFetcher, store_in


def wishes_in(folder: Path) -> tuple[Wishes, BlobStore, dict[str, BlobStore]]:
    mine, stores = store_in(folder / "mine"), {name: store_in(folder / name) for name in ("a", "b")}
    fetcher: Any = CopyingFetcher(mine, stores)
    return Wishes(cast(Any, fetcher), lambda: ["b"]), mine, stores


async def test_a_wish_is_new_until_it_is_dropped(tmp_path: Path) -> None:
    wishes, _, _ = wishes_in(tmp_path)
    blob = Blob.of(b"x")
    assert wishes.want(blob, ["a"]) and not wishes.want(blob, ["b"])
    wishes.drop(blob)
    assert wishes.want(blob, ["a"])
    wishes.clear()
    assert wishes.want(blob, ["a"])


async def test_sources_may_change_while_a_fetch_is_under_way(tmp_path: Path) -> None:
    wishes, mine, stores = wishes_in(tmp_path)
    blob = stores["b"].put(b"x")
    wishes.want(blob, ["a"])
    fetch = asyncio.create_task(wishes.get(blob, 5.0))
    await asyncio.sleep(0.02)
    assert not fetch.done()
    wishes.want(blob, ["a", "b"])
    await fetch
    assert mine.read(blob.digest) == b"x"


async def test_who_is_named_has_a_while_before_all_others_are_asked(tmp_path: Path) -> None:
    _, mine, stores = wishes_in(tmp_path)
    fetcher: Any = CopyingFetcher(mine, stores)
    moment = 10.0
    wishes = Wishes(cast(Any, fetcher), lambda: ["b"], lambda: moment)
    blob = stores["b"].put(b"x")
    wishes.want(blob, ["a"])
    moment += PATIENCE / 2
    with pytest.raises(UnreachableError):
        await wishes.get(blob, 0.02)
    wishes.want(blob, ["a", "c"])  # what is said of it anew does not begin anew
    moment += PATIENCE / 2
    await wishes.get(blob, 5.0)
    assert mine.has(blob.digest)


async def test_where_nobody_is_named_everybody_is_asked(tmp_path: Path) -> None:
    wishes, mine, stores = wishes_in(tmp_path)
    for text in (b"x", b"y"):
        blob = stores["b"].put(text)
        await (wishes.get(blob, 5.0) if text == b"x" else wishes.get_from_anyone(blob, 5.0))
        assert mine.has(blob.digest)
    with pytest.raises(UnreachableError):
        await wishes.get_from_anyone(stores["a"].put(b"z"), 0.02)

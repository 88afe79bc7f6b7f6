"""Wishes are new once, their sources change under way, others are asked as well, and some are asked to carry."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from node.daemon.peers.downloads import (
    EXTRA_SOURCES_AFTER_SECONDS,
    MAX_CIRCUIT_BYTES,
    MAX_REQUESTS_PER_RELAY,
    Downloads,
)
from protocol.blobs.blob import Blob
from protocol.blobs.store import BlobStore
from protocol.consensus.messages.contributions import PartBlob
from protocol.errors import GoneError, LimitError, UnreachableError
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed
from tests.node.daemon.recorded_errors import FixedSources, RecordedErrors
from tests.node.small_run import CopyingFetcher, store_in


def downloads_from(fetcher: Any, peers: Callable[[], list[PeerId]], **clock: Callable[[], float]) -> Downloads:
    sources: Any = FixedSources(peers)
    return Downloads(fetcher, sources, sources, RecordedErrors(), **clock)


def downloads_in(folder: Path) -> tuple[Downloads, BlobStore, dict[str, BlobStore]]:
    mine, stores = store_in(folder / "mine"), {name: store_in(folder / name) for name in ("a", "b")}
    fetcher: Any = CopyingFetcher(mine, stores)
    return downloads_from(cast(Any, fetcher), lambda: ["b"]), mine, stores


async def test_a_wish_is_new_until_it_is_dropped(tmp_path: Path) -> None:
    wishes, _, _ = downloads_in(tmp_path)
    blob = Blob.of(b"x")
    assert wishes.request(PartBlob(blob, 0), ["a"]) and not wishes.request(PartBlob(blob, 0), ["b"])
    wishes.cancel(PartBlob(blob, 0))
    assert wishes.request(PartBlob(blob, 0), ["a"])
    wishes.cancel_all()
    assert wishes.request(PartBlob(blob, 0), ["a"])


async def test_the_same_digest_of_another_size_or_part_is_another_wish(tmp_path: Path) -> None:
    wishes, _, _ = downloads_in(tmp_path)
    blob = Blob.of(b"x")
    named = [PartBlob(blob, 0), PartBlob(blob, 1), PartBlob(Blob(blob.digest, 2), 0)]
    assert all(wishes.request(portion, ["a"]) for portion in named)
    wishes.cancel(named[0])
    assert [wishes.request(portion, ["a"]) for portion in named] == [True, False, False]


async def test_sources_may_change_while_a_fetch_is_under_way(tmp_path: Path) -> None:
    wishes, mine, stores = downloads_in(tmp_path)
    blob = stores["b"].put(b"x")
    wishes.request(PartBlob(blob, 0), ["a"])
    fetch = asyncio.create_task(wishes.download(PartBlob(blob, 0), 5.0))
    await asyncio.sleep(0.02)
    assert not fetch.done()
    wishes.request(PartBlob(blob, 0), ["a", "b"])
    await fetch
    assert mine.read(blob.digest) == b"x"


async def test_who_is_named_has_a_while_before_all_others_are_asked(tmp_path: Path) -> None:
    _, mine, stores = downloads_in(tmp_path)
    fetcher: Any = CopyingFetcher(mine, stores)
    moment = 10.0
    wishes = downloads_from(cast(Any, fetcher), lambda: ["b"], clock=lambda: moment)
    blob = stores["b"].put(b"x")
    wishes.request(PartBlob(blob, 0), ["a"])
    moment += EXTRA_SOURCES_AFTER_SECONDS / 2
    with pytest.raises(UnreachableError):
        await wishes.download(PartBlob(blob, 0), 0.02)
    wishes.request(PartBlob(blob, 0), ["a", "c"])  # what is said of it anew does not begin anew
    moment += EXTRA_SOURCES_AFTER_SECONDS / 2
    await wishes.download(PartBlob(blob, 0), 5.0)
    assert mine.has(blob.digest)


async def test_where_nobody_is_named_everybody_is_asked(tmp_path: Path) -> None:
    wishes, mine, stores = downloads_in(tmp_path)
    for text in (b"x", b"y"):
        blob = stores["b"].put(text)
        await (wishes.download(PartBlob(blob, 0), 5.0) if text == b"x" else wishes.download_from_anyone(5.0, blob))
        assert mine.has(blob.digest)
    with pytest.raises(UnreachableError):
        await wishes.download(PartBlob(stores["a"].put(b"z"), 0), 0.02)


class HangingFetcher(CopyingFetcher):
    """One blob never ends."""

    def __init__(self, store: BlobStore, stores: dict[PeerId, BlobStore], hanging: Blob) -> None:
        super().__init__(store, stores)
        self._hanging = hanging

    async def fetch(self, blob: Blob, *given: Any, **options: Any) -> None:
        if blob != self._hanging:
            return await super().fetch(blob, *given, **options)
        self.under_way += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.under_way -= 1


async def test_from_anyone_come_all_at_once_and_what_is_gone_ends_the_others(tmp_path: Path) -> None:
    mine, other = store_in(tmp_path / "mine"), store_in(tmp_path / "other")
    hanging, gone = Blob.of(b"hanging"), Blob.of(b"gone")
    fetcher: Any = HangingFetcher(mine, {"b": other}, hanging)
    wishes = downloads_from(fetcher, lambda: ["b"])
    blobs = [other.put(text) for text in (b"first", b"second")]
    await wishes.download_from_anyone(5.0, *blobs)
    assert all(mine.has(blob.digest) for blob in blobs) and fetcher.turns == {blobs[0]: 0, blobs[1]: 1}
    with pytest.raises(GoneError):
        await wishes.download_from_anyone(60.0, hanging, gone)
    assert fetcher.under_way == 0
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0, "who asked goes on as if nothing had happened"


async def test_who_is_cancelled_leaves_nothing_under_way(tmp_path: Path) -> None:
    mine, other = store_in(tmp_path / "mine"), store_in(tmp_path / "other")
    hanging = Blob.of(b"hanging")
    fetcher: Any = HangingFetcher(mine, {"b": other}, hanging)
    getting = asyncio.create_task(downloads_from(fetcher, lambda: ["b"]).download_from_anyone(60.0, hanging))
    while not fetcher.under_way:
        await asyncio.sleep(0)
    getting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await getting
    assert fetcher.under_way == 0


async def test_what_somebody_named_is_asked_of_those_who_had_it(tmp_path: Path) -> None:
    mine, (a, b) = store_in(tmp_path / "mine"), (store_in(tmp_path / name) for name in "ab")
    fetcher: Any = CopyingFetcher(mine, {"a": a, "b": b})
    live = ["a", "b"]
    wishes = downloads_from(fetcher, lambda: live)
    blob = b.put(b"x")
    with pytest.raises(GoneError):
        await wishes.download_from_holders(blob, 5.0, ["a"])
    live.remove("a")
    await wishes.download_from_holders(blob, 5.0, ["a"])
    assert mine.has(blob.digest), "where none of them lives all others are asked"


LARGE = b"x" * (MAX_CIRCUIT_BYTES + 1)
OFFER = Signed(kind="contribution")


class RelayedDownloads:
    """a and b are hidden as we are, c and d can be called; what is carried lies in the carrier's store."""

    def __init__(self, folder: Path, carriers: str = "cd", willing: str = "cd") -> None:
        self.mine = store_in(folder / "mine")
        self.stores = {name: store_in(folder / name) for name in "abcd"}
        self.carriers = carriers
        self.willing = willing
        self.asked: list[PeerId] = []
        self.errors = RecordedErrors()
        fetcher: Any = CopyingFetcher(self.mine, {name: self.stores[name] for name in "cd"})
        sources: Any = self
        self.wishes = Downloads(fetcher, sources, sources, self.errors)
        self.reached = fetcher.stores

    def other_trainers(self) -> list[PeerId]:
        return []

    def live_peers(self, chosen: Sequence[PeerId]) -> list[PeerId]:
        return []

    def unreachable_peers(self) -> frozenset[PeerId]:
        return frozenset("ab" if self.carriers else "")

    def relay_candidates(self, owner: PeerId) -> list[PeerId]:
        return list(self.carriers)

    async def request_relay(self, carrier: PeerId, offer: Signed, digest: bytes, seconds: float) -> None:
        assert offer is OFFER
        self.asked.append(carrier)
        if carrier not in self.willing:
            raise LimitError("it is too much")
        self.stores[carrier].put(self.stores["a"].read(digest))

    async def get(self, data: bytes, seconds: float = 5.0, sources: str = "a") -> None:
        blob = self.stores["a"].put(data)
        self.wishes.request(PartBlob(blob, 0), list(sources))
        await self.wishes.download(PartBlob(blob, 0), seconds, OFFER)
        assert self.mine.read(blob.digest) == data


async def test_what_only_hidden_peers_have_is_carried_by_the_first_who_does(tmp_path: Path) -> None:
    streets = RelayedDownloads(tmp_path, willing="d")
    await streets.get(LARGE)
    assert streets.asked == ["c", "d"] and not streets.errors.recovered


async def test_nobody_is_asked_to_carry_what_is_small_or_what_somebody_in_reach_has(tmp_path: Path) -> None:
    streets = RelayedDownloads(tmp_path)
    streets.reached["a"] = streets.stores["a"]
    await streets.get(LARGE[1:])
    streets.stores["c"].put(2 * LARGE)
    await streets.get(2 * LARGE, sources="ac")
    assert streets.asked == []


@pytest.mark.parametrize(("carriers", "willing"), [("cd", ""), ("", "")])
async def test_where_nobody_carries_the_owner_is_asked_after_all(tmp_path: Path, carriers: str, willing: str) -> None:
    streets = RelayedDownloads(tmp_path, carriers, willing)
    streets.reached["a"] = streets.stores["a"]
    await streets.get(LARGE)
    assert streets.asked == list(carriers)
    assert streets.errors.recovered == ["no relay"] * bool(carriers)
    tried = "asking the owner itself (c: it is too much; d: it is too much)"
    assert all(tried in line for line in streets.errors.lines)


async def test_one_carrier_is_asked_for_few_at_once(tmp_path: Path) -> None:
    """What else is said to it would wait behind them."""
    streets, at_once, most = RelayedDownloads(tmp_path, carriers="c"), 0, 0
    ask = streets.request_relay

    async def slowly(carrier: PeerId, offer: Signed, digest: bytes, seconds: float) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.01)
        at_once -= 1
        await ask(carrier, offer, digest, seconds)

    streets.request_relay = slowly  # type: ignore[method-assign]
    await asyncio.gather(*(streets.get(LARGE + bytes([number])) for number in range(30)))
    assert most == MAX_REQUESTS_PER_RELAY and len(streets.asked) == 30


async def test_without_carriers_it_does_not_come(tmp_path: Path) -> None:
    """The control."""
    with pytest.raises(UnreachableError):
        await RelayedDownloads(tmp_path, willing="").get(LARGE, 0.1)

"""A download that a cut interrupts goes on where it was; what came is not fetched again."""

import asyncio
import random
import sys
from pathlib import Path

import pytest

from protocol.blobs.blob import PIECE_BYTES, Blob
from protocol.blobs.download import Downloader
from protocol.blobs.store import BlobStore
from protocol.errors import UnreachableError
from protocol.identity import PeerId
from protocol.transport.transport import Transport
from tests.netlab.lab import blob_server
from tests.netlab.lab.laboratory import Laboratory, Link, Node, read_line
from tests.swarm.process_swarm import isolated_processes

pytestmark = [pytest.mark.netlab, pytest.mark.timeout(180)]

SIZE = 12 * PIECE_BYTES
SLACK = 3 * PIECE_BYTES  # pieces that were under way at the cut
CUT_SECONDS = 2.0
PATIENCE = 40.0


class Download:
    """Of the server's blob to a folder, by one process after the other."""

    def __init__(self, folder: Path, transport: Transport, peer: PeerId, blob: Blob) -> None:
        self.folder = folder
        self._transport = transport
        self._peer = peer
        self._blob = blob
        self.received = 0

    async def attempt(self, seconds: float, stop_at: int | None = None) -> bool:
        """Whether it arrived; given up after so many seconds, or bytes."""
        store = BlobStore(self.folder, 2 * SIZE)
        fetcher = Downloader(store, self._transport.bulk, random.Random(0))
        fetch = asyncio.create_task(fetcher.fetch(self._blob, lambda: [self._peer], seconds))
        while not fetch.done() and (stop_at is None or fetcher.bytes_received < stop_at):
            await asyncio.sleep(0.01)
        fetch.cancel()
        await asyncio.gather(fetch, return_exceptions=True)
        self.received += fetcher.bytes_received
        if not fetch.cancelled() and (error := fetch.exception()) and not isinstance(error, UnreachableError):
            raise error
        return store.has(self._blob.digest)


async def interrupted(laboratory: Laboratory, server: Node, download: Download) -> bool:
    """Cut in the middle; the same process waits and goes on."""
    fetch = asyncio.create_task(download.attempt(PATIENCE))
    while sum(path.stat().st_blocks * 512 for path in download.folder.glob("*.part")) < SIZE // 2:
        assert not fetch.done()
        await asyncio.sleep(0.01)
    await asyncio.to_thread(laboratory.cut, server)
    await asyncio.sleep(CUT_SECONDS)  # the length of the cut, not a wait for anything
    assert not fetch.done()
    await asyncio.to_thread(laboratory.heal)
    return await fetch


async def given_up(download: Download, again: Path) -> bool:
    """The process gives up half-way; another one finishes, in the folder `again`."""
    assert not await download.attempt(PATIENCE, stop_at=SIZE // 2)
    download.folder = again
    return await download.attempt(PATIENCE)


def test_an_interrupted_download_is_not_begun_again(laboratory: Laboratory, tmp_path: Path) -> None:
    client, server = laboratory.node(Link(down=40)), laboratory.node(Link(up=40, delay=0.01))
    with isolated_processes():
        command = [sys.executable, blob_server.__file__, str(tmp_path / "server"), server.address, str(SIZE), "1"]
        address, name, _ = read_line(laboratory.start(server, command)).split()
        blob = Blob(bytes.fromhex(name), SIZE)

        async def scene() -> dict[str, int]:
            transport = await Transport.start(tmp_path / "key", tmp_path, [], listen=[f"/ip4/{client.address}/tcp/0"])
            try:
                peer = await transport.connect(address, 10.0)
                downloads = [Download(tmp_path / word, transport, peer, blob) for word in ("cut", "kept", "lost")]
                assert await interrupted(laboratory, server, downloads[0])
                assert await given_up(downloads[1], again=tmp_path / "kept")
                assert await given_up(downloads[2], again=tmp_path / "empty")
                return {download.folder.name: download.received for download in downloads}
            finally:
                await transport.stop()

        with laboratory.inside(client):
            received = asyncio.run(scene())
    print({word: f"{count / SIZE:.2f} of the blob" for word, count in received.items()})
    assert SIZE <= received["cut"] <= SIZE + SLACK and SIZE <= received["kept"] <= SIZE + SLACK
    assert received["empty"] >= SIZE + SIZE // 2, "the control: who has lost the pieces fetches them again"

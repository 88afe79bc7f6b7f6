"""A peer that fetches one blob, run inside a node: `blob_taker.py FOLDER HOST SECONDS WAY ADDRESS DIGEST PORT SIZE`.

WAY: `libp2p`; `direct`, as the product does it; `single`, directly with one connection. ADDRESS, DIGEST and PORT are
what `blob_server.py` says.
"""

import asyncio
import json
import random
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

from protocol.blobs.blob import Blob
from protocol.blobs.download import Downloader
from protocol.blobs.store import BlobStore
from protocol.errors import UnreachableError
from protocol.transport.multipath_policy import ConnectionCountController
from protocol.transport.transport import Transport


async def download(folder: Path, host: str, seconds: float, address: str, blob: Blob, port: int) -> None:
    """Prints the seconds it took, how many bytes came in them, and by which path."""
    folder.mkdir()
    store = BlobStore(folder / "blobs", blob.size)
    transport = await Transport.start(folder / "key", folder, [], listen=[f"/ip4/{host}/tcp/0"])
    peer = address.rpartition("/")[2]
    transport.introduce(peer, [address], port)
    fetcher = Downloader(store, transport.bulk, random.Random(0))
    began, whole = time.monotonic(), True
    try:
        await fetcher.fetch(blob, lambda: [peer], seconds)
    except UnreachableError:
        whole = False
    taken = time.monotonic() - began
    outcome = {
        "whole": whole,
        "seconds": taken,
        "bytes": fetcher.bytes_received,
        "path": transport.bulk.describe_paths()[peer],
    }
    print(json.dumps(outcome), flush=True)
    await transport.stop()


if __name__ == "__main__":
    folder, host, seconds, way, address, digest, port, size = sys.argv[1:]
    wanted = Blob(bytes.fromhex(digest), int(size))
    with patch.object(ConnectionCountController, "observe", lambda *_: None) if way == "single" else nullcontext():
        asyncio.run(download(Path(folder), host, float(seconds), address, wanted, 0 if way == "libp2p" else int(port)))

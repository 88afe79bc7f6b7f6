"""A peer that has one blob and nothing else, run inside a node: `blob_server.py FOLDER HOST BYTES SEED`."""

import asyncio
import random
import sys
from pathlib import Path

from protocol.blobs.server import BlobService, register_blob_service
from protocol.blobs.store import BlobStore
from protocol.transport.transport import Transport, caller


async def serve(folder: Path, host: str, size: int, seed: int) -> None:
    """Prints its address, the blob's digest, and the port for direct connections."""
    folder.mkdir()
    store = BlobStore(folder / "blobs", 2 * size)
    blob = store.put(random.Random(seed).randbytes(size))
    service = BlobService(store, caller)
    services = [lambda server: register_blob_service(service, server)]
    transport = await Transport.start(folder / "key", folder, services, listen=[f"/ip4/{host}/tcp/4001"], direct=0)
    print((await transport.addresses())[0], blob.name, transport.direct_port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))

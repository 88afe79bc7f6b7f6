"""A small blob service, and a process that serves it: `python -m tests.protocol.transport.sample_peer FOLDER`."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from protocol import murmur_pb2, murmur_pb2_grpc
from protocol.transport.transport import Transport, caller

CHUNK = 256 * 1024


class SampleBlobs(murmur_pb2_grpc.BlobsServicer):
    """`Pieces` returns the caller's peer id; `Fetch` yields `length` bytes and counts them."""

    def __init__(self) -> None:
        self.yielded = 0

    async def Pieces(  # noqa: N802
        self, request: murmur_pb2.PiecesRequest, context: grpc.aio.ServicerContext
    ) -> murmur_pb2.PiecesReply:
        return murmur_pb2.PiecesReply(size=len(request.digest), pieces=caller(context).encode())

    async def Fetch(  # noqa: N802
        self, request: murmur_pb2.FetchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[murmur_pb2.Chunk]:
        for _ in range(request.length // CHUNK):
            self.yielded += CHUNK
            yield murmur_pb2.Chunk(data=bytes(CHUNK))

    def add(self, server: Any) -> None:
        murmur_pb2_grpc.add_BlobsServicer_to_server(self, server)


async def serve(folder: Path) -> None:
    transport = await Transport.start(folder / "key", folder, [SampleBlobs().add], direct=0)
    about = {
        "peer": transport.peer_id,
        "addresses": await transport.addresses(),
        "direct": transport.direct_port,
        "p2pd": transport._p2pd.pid,
        "sockets": str((folder / "sockets").readlink()),
    }
    print(json.dumps(about), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))

"""A gRPC server for a test, over a Unix socket."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc


@asynccontextmanager
async def serve_locally(path: Path, register: Callable[[grpc.aio.Server], None]) -> AsyncIterator[grpc.aio.Channel]:
    """Serve the registered servicers, and yield a channel to them."""
    server = grpc.aio.server()
    register(server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            yield channel
    finally:
        await server.stop(None)

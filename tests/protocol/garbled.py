"""A server whose answers are bytes, but no messages."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from protocol.murmur_pb2 import DESCRIPTOR

GARBLED = b"\xff\xff\xff"


class _Answers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """To every call of ours."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        _, service, method = details.method.split("/")
        if DESCRIPTOR.services_by_name[service.rpartition(".")[2]].methods_by_name[method].server_streaming:
            return grpc.unary_stream_rpc_method_handler(_several)
        return grpc.unary_unary_rpc_method_handler(_one)


async def _one(request: bytes, context: object) -> bytes:
    return GARBLED


async def _several(request: bytes, context: object) -> AsyncIterator[bytes]:
    yield GARBLED


@asynccontextmanager
async def garbled(path: Path) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to it, over this socket."""
    server = grpc.aio.server(handlers=[_Answers()])
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        yield channel
    await server.stop(None)

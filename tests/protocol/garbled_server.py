"""A gRPC server whose answers do not parse."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from protocol.murmur_pb2 import DESCRIPTOR
from tests.protocol.local_server import serve_locally

GARBLED = b"\xff\xff\xff"


class _Answers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers every RPC of ours with GARBLED."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        _, service, method = details.method.split("/")
        if DESCRIPTOR.services_by_name[service.rpartition(".")[2]].methods_by_name[method].server_streaming:
            return grpc.unary_stream_rpc_method_handler(_garbled_stream)
        return grpc.unary_unary_rpc_method_handler(_garbled_reply)


async def _garbled_reply(request: bytes, context: object) -> bytes:
    return GARBLED


async def _garbled_stream(request: bytes, context: object) -> AsyncIterator[bytes]:
    yield GARBLED


@asynccontextmanager
async def garbled_channel(path: Path) -> AsyncIterator[grpc.aio.Channel]:
    """Open a channel to such a server over this socket."""
    async with serve_locally(path, lambda server: server.add_generic_rpc_handlers((_Answers(),))) as channel:
        yield channel

"""The Runs service of a node, for those who are about to join: the run's manifest, and whether they can be reached.

The manifest goes to whoever knows the run's id, which is its hash.
"""

import time
from collections.abc import Callable
from typing import Any

import grpc

from protocol.errors import LimitError, PeerFault, StaleError, TransportError, UnreachableError
from protocol.identity import PeerId
from protocol.manifest import Manifest
from protocol.murmur_pb2 import DialBackReply, DialBackRequest, ManifestReply, ManifestRequest
from protocol.murmur_pb2_grpc import RunsServicer
from protocol.network.dial_back import DialBackResponder
from protocol.network.transport import UNKNOWN_CALLER, caller

INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT


class RunsService(RunsServicer):
    """`refused` hears of the calls that are not answered."""

    def __init__(self, manifest: Manifest, dial_back: DialBackResponder, record_refusal: Callable[[PeerId, PeerFault], None]) -> None:
        self._run_id = manifest.run_id
        self._dial_back = dial_back
        self._record_refusal = record_refusal
        self._manifest_toml = manifest.to_toml().encode()

    async def Manifest(self, request: ManifestRequest, context: Any) -> ManifestReply:  # noqa: N802
        await self._admit(request.run, context)
        return ManifestReply(toml=self._manifest_toml)

    async def DialBack(self, request: DialBackRequest, context: Any) -> DialBackReply:  # noqa: N802
        peer = await self._admit(request.run, context)
        try:
            return await self._dial_back.probe_ports(peer, request.ports, time.monotonic())
        except PeerFault as fault:
            self._record_refusal(peer, fault)
            status = grpc.StatusCode.RESOURCE_EXHAUSTED if isinstance(fault, LimitError) else INVALID_ARGUMENT
            await context.abort(status, str(fault))
        except (TransportError, UnreachableError) as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        raise AssertionError("abort raises")

    async def _admit(self, run: bytes, context: Any) -> PeerId:
        peer = UNKNOWN_CALLER
        try:
            peer = caller(context)
            if run.hex() != self._run_id:
                raise StaleError("this node takes part in another run")
        except PeerFault as fault:
            self._record_refusal(peer, fault)
            await context.abort(INVALID_ARGUMENT, str(fault))
        return peer

"""The Runs service of a node, for those who are about to join: the run's manifest, and whether they can be reached.

The manifest goes to whoever knows the run's id, which is its hash.
"""

import logging
import time
from typing import Any

import grpc

from protocol.errors import LimitError, PeerFault, TransportError, UnreachableError
from protocol.manifest import Manifest
from protocol.murmur_pb2 import DialBackReply, DialBackRequest, ManifestReply, ManifestRequest
from protocol.murmur_pb2_grpc import RunsServicer
from protocol.network.dial_back import DialBack
from protocol.network.transport import caller

logger = logging.getLogger(__name__)

INVALID = grpc.StatusCode.INVALID_ARGUMENT


class RunsService(RunsServicer):
    def __init__(self, manifest: Manifest, dial_back: DialBack) -> None:
        self._run_id, self._dial_back = manifest.run_id, dial_back
        self._text = manifest.to_toml().encode()

    async def Manifest(self, request: ManifestRequest, context: Any) -> ManifestReply:  # noqa: N802
        await self._require_run(request.run, context)
        return ManifestReply(toml=self._text)

    async def DialBack(self, request: DialBackRequest, context: Any) -> DialBackReply:  # noqa: N802
        await self._require_run(request.run, context)
        try:
            return await self._dial_back.answer(caller(context), request.ports, time.monotonic())
        except PeerFault as fault:
            logger.warning("a call to dial back was refused: %s", fault)
            status = grpc.StatusCode.RESOURCE_EXHAUSTED if isinstance(fault, LimitError) else INVALID
            await context.abort(status, str(fault))
        except (TransportError, UnreachableError) as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        raise AssertionError("abort raises")

    async def _require_run(self, run: bytes, context: Any) -> None:
        if run.hex() != self._run_id:
            logger.warning("a call was refused: it asks about another run")
            await context.abort(INVALID, "this node takes part in another run")

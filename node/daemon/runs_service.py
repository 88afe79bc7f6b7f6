"""The Runs service of a node: it gives the run's manifest to whoever knows the run's id, which is its hash."""

import logging
from typing import Any

import grpc

from protocol.manifest import Manifest
from protocol.murmur_pb2 import ManifestReply, ManifestRequest
from protocol.murmur_pb2_grpc import RunsServicer

logger = logging.getLogger(__name__)


class RunsService(RunsServicer):
    def __init__(self, manifest: Manifest) -> None:
        self._run_id = manifest.run_id
        self._text = manifest.to_toml().encode()

    async def Manifest(self, request: ManifestRequest, context: Any) -> ManifestReply:  # noqa: N802
        if request.run.hex() != self._run_id:
            logger.warning("a call was refused: it asks for the manifest of another run")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this node takes part in another run")
        return ManifestReply(toml=self._text)

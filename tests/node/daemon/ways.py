"""How calls go where a test says so."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import grpc

from protocol.identity import PeerId


class Only:
    """One channel to everybody, and others that are quick or spare, or none."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        spare: grpc.aio.Channel | None = None,
        quick: grpc.aio.Channel | None = None,
    ) -> None:
        self._channel = channel
        self._spare = spare
        self._quick = quick

    def channel(self, peer: PeerId) -> grpc.aio.Channel:
        return self._channel

    def quick(self, peer: PeerId) -> AbstractContextManager[Any]:
        return nullcontext(self._quick)

    def spare(self, peer: PeerId) -> AbstractContextManager[Any]:
        return nullcontext(self._spare)

"""How calls go where a test says so."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import grpc

from protocol.identity import PeerId


class FixedChannels:
    """One channel to everybody, and others that are quick or spare, or none."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        fallback: grpc.aio.Channel | None = None,
        idle: grpc.aio.Channel | None = None,
    ) -> None:
        self._channel = channel
        self._spare = fallback
        self._quick = idle

    def channel(self, peer: PeerId) -> grpc.aio.Channel:
        return self._channel

    def idle_channel(self, peer: PeerId) -> AbstractContextManager[Any]:
        return nullcontext(self._quick)

    def fallback_channel(self, peer: PeerId) -> AbstractContextManager[Any]:
        return nullcontext(self._spare)

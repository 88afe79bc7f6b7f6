"""How calls go where a test says so."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import grpc

from protocol.identity import PeerId


class Only:
    """One channel to everybody, and one other that is spare, or none."""

    def __init__(self, channel: grpc.aio.Channel, spare: grpc.aio.Channel | None = None) -> None:
        self._channel, self._spare = channel, spare

    def channel(self, peer: PeerId) -> grpc.aio.Channel:
        return self._channel

    def spare(self, peer: PeerId) -> AbstractContextManager[Any]:
        return nullcontext(self._spare)

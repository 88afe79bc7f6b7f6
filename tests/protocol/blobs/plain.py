"""Channels for a fetch without a transport."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc


@dataclass
class PlainLease:
    channel: grpc.aio.Channel

    def received(self, size: int) -> None:
        pass

    def broken(self, reason: str) -> None:
        pass


@dataclass
class PlainCarrier:
    """One channel to each peer."""

    channel: Callable[[str], grpc.aio.Channel]

    @contextmanager
    def lease(self, peer: str) -> Iterator[PlainLease]:
        yield PlainLease(self.channel(peer))

    def places(self, peer: str) -> int:
        return 0

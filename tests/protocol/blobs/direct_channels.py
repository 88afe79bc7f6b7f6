"""Channels for downloads without a transport."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc


@dataclass
class DirectLease:
    channel: grpc.aio.Channel

    def record_received(self, size: int) -> None:
        pass

    def report_broken(self, reason: str) -> None:
        pass


@dataclass
class DirectChannels:
    """One channel per peer."""

    channel: Callable[[str], grpc.aio.Channel]

    @contextmanager
    def lease_channel(self, peer: str) -> Iterator[DirectLease]:
        yield DirectLease(self.channel(peer))

    def parallelism(self, peer: str) -> int:
        return 0

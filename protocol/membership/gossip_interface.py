"""Define the interfaces of the peer directory: its settings, the errors of its calls, and its news."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import grpc

from protocol.errors import LimitError, PeerFault, StaleError, UnreachableError
from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.membership.peer_table import MembershipEvent, PeerJoined, PeerLeft, PeerUpdated
from protocol.murmur_pb2 import PeerRecord


@dataclass(frozen=True, kw_only=True)
class DirectoryOptions:
    """Settings of a run's peer directory, in seconds.

    `addresses_file` keeps peers' addresses over restarts.
    """

    run_id: RunId
    heartbeat: float
    expiry: float
    bootstrap: Sequence[str] = ()
    addresses_file: Path | None = None


LEAVE_TEXTS = {
    "left": "left",
    "expired": "is silent and counts as gone",
    "unreachable": "does not answer and counts as gone",
}


class GossipTransport(Protocol):
    """The part of the transport that the directory uses."""

    async def addresses(self) -> tuple[str, ...]: ...
    def introduce(self, peer: PeerId, addresses: Sequence[str], direct_port: int = 0) -> None: ...
    def forget(self, peer: PeerId) -> None: ...
    def set_voters(self, voters: frozenset[PeerId]) -> None: ...
    def channel(self, peer: PeerId) -> grpc.aio.Channel: ...


def describe_call_error(error: Exception) -> str:
    if not isinstance(error, grpc.aio.AioRpcError):
        return str(error)
    # gRPC's own texts for these codes describe our local sockets.
    texts = {grpc.StatusCode.UNAVAILABLE: "cannot be reached", grpc.StatusCode.DEADLINE_EXCEEDED: "no answer in time"}
    return texts.get(error.code()) or str(error.details())


def is_unreachable(error: Exception) -> bool:
    """Return whether a failure means that the peer is absent.

    A peer that refuses us is present.
    """
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return isinstance(error, UnreachableError)


async def abort_call(context: Any, fault: PeerFault) -> NoReturn:
    codes = {LimitError: grpc.StatusCode.RESOURCE_EXHAUSTED, StaleError: grpc.StatusCode.FAILED_PRECONDITION}
    await context.abort(codes.get(type(fault), grpc.StatusCode.INVALID_ARGUMENT), str(fault))
    raise AssertionError("abort always raises")


def describe_event(event: PeerJoined | PeerLeft | PeerUpdated) -> str:
    if isinstance(event, PeerLeft):
        return f"{event.peer} {LEAVE_TEXTS.get(event.reason, event.reason)}"
    return f"{event.peer} {'joined' if event.record.role == 'trainer' else 'is watching'}"


class MembershipChanges:
    """Compares the live peers with those of the last call."""

    def __init__(self) -> None:
        self._sequences: dict[PeerId, int] = {}

    def since_last(
        self, live: Mapping[PeerId, PeerRecord], departure_of: Callable[[PeerId], PeerLeft]
    ) -> list[MembershipEvent]:
        """Return an event for each peer that joined, left or changed its record."""
        known = self._sequences
        events: list[MembershipEvent] = [departure_of(peer) for peer in known.keys() - live.keys()]
        for peer, record in live.items():
            if peer not in known:
                events.append(PeerJoined(peer, record))
            elif record.sequence != known[peer]:
                events.append(PeerUpdated(peer, record))
        self._sequences = {peer: record.sequence for peer, record in live.items()}
        return events

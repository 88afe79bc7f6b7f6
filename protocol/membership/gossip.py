"""The interfaces of the peer directory, and the messages of one exchange of records. No I/O."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import grpc

from protocol.errors import LimitError, PeerFault, StaleError, UnreachableError
from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.membership.peer_table import MembershipEvent, PeerJoined, PeerLeft, PeerTable, PeerUpdated
from protocol.membership.summary import Summary
from protocol.murmur_pb2 import GossipReply, GossipRequest, PeerRecord, Signed

MAX_RECORDS = 256  # per message; with the largest records and MAX_PEERS known still below 1 MiB


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
    "ended": "has ended without a goodbye",
}


class GossipTransport(Protocol):
    """The part of the transport that the directory uses."""

    async def addresses(self) -> tuple[str, ...]: ...
    def introduce(self, peer: PeerId, addresses: Sequence[str], direct_port: int = 0) -> None: ...
    def forget(self, peer: PeerId) -> None: ...
    async def has_ended(self, peer: PeerId) -> bool: ...
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
    verbs = {"trainer": "joined", "rollout": "rolls out"}
    return f"{event.peer} {verbs.get(event.record.role, 'is watching')}"


class MembershipChanges:
    """Compares the live peers with those of the last call."""

    def __init__(self) -> None:
        self._sequences: dict[PeerId, int] = {}
        self._ended: frozenset[PeerId] = frozenset()

    def since_last(
        self,
        live: Mapping[PeerId, PeerRecord],
        departure_of: Callable[[PeerId], PeerLeft],
        ended: frozenset[PeerId] = frozenset(),
    ) -> list[MembershipEvent]:
        """Return an event for each peer that joined, left or changed its record.

        Another one follows for a peer that did not answer, once its machine says that it has ended (`ended`).
        """
        known, news = self._sequences, ended - self._ended
        self._ended = ended
        events: list[MembershipEvent] = [departure_of(peer) for peer in (known.keys() - live.keys()) | news]
        for peer, record in live.items():
            if peer not in known:
                events.append(PeerJoined(peer, record))
            elif record.sequence != known[peer]:
                events.append(PeerUpdated(peer, record))
        self._sequences = {peer: record.sequence for peer, record in live.items()}
        return events


def make_request(run: bytes, time: float, table: PeerTable, pushed: Mapping[PeerId, int], summary: Summary | None
) -> GossipRequest:  # fmt: skip
    """Return a request that sends records, and asks for those that the summary lacks; for none without a summary.

    Args:
        pushed: the peers whose records to send, with the sequences that the receiver has (0: none).
    """
    records, updates = table.updates_for(pushed)
    known, salt = (summary.to_bytes(), summary.salt) if summary else (b"", b"")
    return GossipRequest(run=run, time=time, known=known, salt=salt, records=records, updates=updates)


def make_reply(
    table: PeerTable, summary: Summary, first: Sequence[Signed], me: PeerId, rng: random.Random
) -> GossipReply:
    """Return the reply to a request: `first`, the records that it lacks, and a summary of those that we want.

    The caller adds what concerns the clock. If there are more than one message takes, a random choice goes, with our
    own record, because the rest depends on our standing.
    """
    newer, wanted = summary.compare(table.known_sequences())
    if len(newer) > MAX_RECORDS - len(first):
        own = [me] if me in newer else []
        others = rng.sample([peer for peer in newer if peer != me], MAX_RECORDS - len(first) - len(own))
        newer = {peer: newer[peer] for peer in (*own, *others)}
    records, updates = table.updates_for(newer)
    asked = wanted.first(MAX_RECORDS).to_bytes()
    return GossipReply(records=[*first, *records], updates=updates, wanted=asked)

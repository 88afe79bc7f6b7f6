"""Directories in one process on a simulated network with faults."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from protocol.errors import TransportError
from protocol.identity import Identity
from protocol.membership.clock import SwarmClock
from protocol.membership.directory import PeerDirectory
from protocol.membership.gossip import DirectoryOptions
from protocol.membership.peer_table import MembershipEvent
from protocol.murmur_pb2 import GossipReply, GossipRequest

RUN = "ab" * 32
HEARTBEAT = 0.05


async def until(condition: Callable[[], object], seconds: float = 15.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class FakeContext:
    """A servicer's context of a call from `peer`."""

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def peer(self) -> str:
        return f"unix-abstract:murmur/{self._peer}/1"

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise rpc_error(code, details)


class FakeChannel:
    def __init__(self, network: "FakeNetwork", source: str, target: str) -> None:
        self._network = network
        self._source = source
        self._target = target

    def unary_unary(self, *_: Any, **__: Any) -> Callable[..., Awaitable[GossipReply]]:
        async def call(request: GossipRequest, timeout: float) -> GossipReply:
            return await self._network.call(self._source, self._target, request, timeout)

        return call


class FakeNetwork:
    """Directories by peer id, and which of them are dead or frozen."""

    def __init__(self) -> None:
        self.directories: dict[str, PeerDirectory] = {}
        self.dead: set[str] = set()
        self.frozen: set[str] = set()
        self.ended: set[str] = set()  # whose machines say that they are dead
        self.asked_machines: list[str] = []
        self.calls: list[tuple[str, str]] = []

    async def call(self, source: str, target: str, request: GossipRequest, seconds: float) -> GossipReply:
        self.calls.append((source, target))
        if target in self.frozen:
            await asyncio.sleep(seconds)
            raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "frozen")
        if target in self.dead or target not in self.directories:
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, "dead")
        copied = GossipRequest.FromString(request.SerializeToString())
        return await self.directories[target].Gossip(copied, FakeContext(source))


class FakeTransport:
    """A transport on the simulated network."""

    def __init__(self, network: FakeNetwork, peer: str) -> None:
        self.network = network
        self.peer = peer
        self.introduced: dict[str, Sequence[str]] = {}
        self.forgotten: list[str] = []
        self.is_broken = False

    async def addresses(self) -> tuple[str, ...]:
        if self.is_broken:
            raise TransportError("p2pd is being restarted")
        return (f"/memory/1/p2p/{self.peer}",)

    def introduce(self, peer: str, addresses: Sequence[str], direct_port: int = 0) -> None:
        self.introduced[peer] = addresses

    def forget(self, peer: str) -> None:
        self.introduced.pop(peer, None)
        self.forgotten.append(peer)

    async def has_ended(self, peer: str) -> bool:
        self.network.asked_machines.append(peer)
        return peer in self.network.ended

    def set_voters(self, voters: frozenset[str]) -> None:
        pass

    def channel(self, peer: str) -> Any:
        # A peer without known addresses cannot be called.
        return FakeChannel(self.network, self.peer, peer if peer in self.introduced else "nowhere")


class EventRecorder(list[MembershipEvent]):
    """Records the events of a directory."""

    def on_membership_changed(self, events: Sequence[MembershipEvent]) -> None:
        self.extend(events)


class GossipSwarm:
    """Directories that gossip on one simulated network."""

    def __init__(self) -> None:
        self.network = FakeNetwork()
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.nodes: dict[str, FakeTransport] = {}

    def add(
        self, identity: Identity | None = None, *, skew: float = 0.0, run: str = RUN, **options: Any
    ) -> PeerDirectory:
        identity = identity or Identity.create()
        node = FakeTransport(self.network, identity.peer_id)
        clock = SwarmClock(lambda: time.time() + skew)
        settings = DirectoryOptions(**{"run_id": run, "heartbeat": HEARTBEAT, "expiry": 1.5, **options})
        directory = PeerDirectory(settings, identity, node, clock, random.Random(len(self.nodes)))
        self.network.dead.discard(directory.peer_id)
        self.network.directories[directory.peer_id] = directory
        self.nodes[directory.peer_id] = node
        self.tasks[directory.peer_id] = asyncio.create_task(directory.run())
        return directory

    def kill(self, directory: PeerDirectory) -> None:
        self.network.dead.add(directory.peer_id)
        self.tasks[directory.peer_id].cancel()

    async def stop(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.wait(self.tasks.values())
        pending = [task for directory in self.network.directories.values() for task in directory._exchanges.values()]
        assert not [task for task in pending if not task.done()]
        for task in self.tasks.values():
            assert task.cancelled(), task  # a loop may end only with the test


def address_of(directory: PeerDirectory) -> str:
    return f"/memory/1/p2p/{directory.peer_id}"


def start_chain(swarm: GossipSwarm, count: int, **options: Any) -> list[PeerDirectory]:
    """Start peers that each know only the previous one."""
    peers = [swarm.add(**options)]
    for _ in range(count - 1):
        peers.append(swarm.add(bootstrap=[address_of(peers[-1])], **options))
    return peers


def all_see(viewers: Sequence[PeerDirectory], expected_peers: Sequence[PeerDirectory]) -> bool:
    expected = {directory.peer_id for directory in expected_peers}
    return all(directory.live().keys() == expected for directory in viewers)

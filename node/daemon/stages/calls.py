"""The calls about microbatches to the peers of all stages; failed ones raise UnreachableError or PeerFault."""

import asyncio
from collections.abc import Iterable
from typing import Any, Protocol

from node.daemon.peers.peer_rpc import PeerChannels, await_reply, call_by_best_channel
from node.daemon.stages.service import StagePeer
from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.murmur_pb2_grpc import StagesStub
from protocol.pipeline.exact.statements import Statement
from protocol.pipeline.messages import Answer, Outcome, Task, invitation_to_wire, release_to_wire
from protocol.pipeline.owner import ASK_SECONDS


class Calls(Protocol):
    """The four calls about microbatches to a peer."""

    async def ask(self, peer: PeerId, task: Task) -> Answer: ...

    async def tell(self, peer: PeerId, outcome: Outcome) -> None: ...

    async def release(self, peer: PeerId, run: RunId, serials: Iterable[int]) -> None: ...

    async def invite(self, peer: PeerId, run: RunId) -> None: ...


class OwnCalls:
    """Calls of a peer to itself, without a network."""

    def __init__(self, here: StagePeer) -> None:
        self._here = here

    async def ask(self, peer: PeerId, task: Task) -> Answer:
        return self._here.answer(task)

    async def tell(self, peer: PeerId, outcome: Outcome) -> None:
        self._here.take_outcome(peer, outcome)

    async def release(self, peer: PeerId, run: RunId, serials: Iterable[int]) -> None:
        self._here.release(peer, run, tuple(serials))

    async def invite(self, peer: PeerId, run: RunId) -> None:
        self._here.take_invitation(peer, run)


class StageChannels(PeerChannels, Protocol):
    """The channels to a peer, and a way to prepare for many small calls."""

    def open_direct(self, peer: PeerId) -> None: ...


class StageCalls:
    """Calls over the channels of a node. They soon go over direct connections, which the downloads use too."""

    def __init__(self, channels: StageChannels) -> None:
        self._channels = channels

    async def ask(self, peer: PeerId, task: Task) -> Answer:
        return Answer.from_wire(await self._call(peer, "Ask", task.to_wire()))

    async def tell(self, peer: PeerId, outcome: Outcome) -> None:
        await self._call(peer, "Tell", outcome.to_wire())

    async def release(self, peer: PeerId, run: RunId, serials: Iterable[int]) -> None:
        await self._call(peer, "Release", release_to_wire(run, serials))

    async def invite(self, peer: PeerId, run: RunId) -> None:
        await self._call(peer, "Invite", invitation_to_wire(run))

    async def state(self, peer: PeerId, statement: Statement) -> None:
        await self._call(peer, "State", statement.to_wire())

    async def _call(self, peer: PeerId, method: str, request: Any) -> Any:
        clock = asyncio.get_running_loop().time
        deadline = clock() + ASK_SECONDS
        self._channels.open_direct(peer)

        async def call(channel: Any, seconds: float) -> Any:
            stub = getattr(StagesStub(channel), method)
            return await await_reply(peer, lambda: stub(request, timeout=seconds))

        return await call_by_best_channel(self._channels, peer, call, lambda: deadline - clock())

"""Carries round statements to other peers: one bounded queue and one worker a peer, so that nobody waits for anybody.

Statements are idempotent at the receiver. A batch that cannot be delivered is tried again with growing pauses, then
given up: the peer is reported as unreachable, and the round goes on without it. Replies may carry statements that the
other side thinks we lack.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

import grpc

from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed

logger = logging.getLogger(__name__)

MAX_WAITING = 256
MAX_BATCH = 16
CALL_SECONDS = 5.0
PAUSES = (0.1, 0.4, 1.0)

Deliver = Callable[[PeerId, Sequence[Signed], float], Awaitable[Iterable[Signed]]]


class Post:
    """`deliver(peer, statements, deadline in seconds)` makes the call; `unreachable(peer)` hears of failures."""

    def __init__(
        self,
        deliver: Deliver,
        received: Callable[[PeerId, Iterable[Signed]], None],
        unreachable: Callable[[PeerId, str], None],
    ) -> None:
        self._deliver = deliver
        self._received = received
        self._unreachable = unreachable
        self._queues: dict[PeerId, asyncio.Queue[Signed]] = {}
        self._workers: dict[PeerId, asyncio.Task[None]] = {}

    def send(self, peers: Iterable[PeerId], statement: Signed) -> None:
        for peer in peers:
            queue = self._queues.get(peer)
            if queue is None:
                queue = self._queues[peer] = asyncio.Queue(MAX_WAITING)
                self._workers[peer] = asyncio.create_task(self._work(peer, queue), name=f"post to {peer}")
            if queue.full():
                self._unreachable(peer, "does not take its post")
                self.forget(peer)
                continue
            queue.put_nowait(statement)

    def forget(self, peer: PeerId) -> None:
        """Drop what waits for a peer that is gone."""
        self._queues.pop(peer, None)
        worker = self._workers.pop(peer, None)
        if worker is not None:
            worker.cancel()

    async def stop(self) -> None:
        workers = list(self._workers.values())
        for peer in list(self._workers):
            self.forget(peer)
        await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, peer: PeerId, queue: asyncio.Queue[Signed]) -> None:
        while True:
            batch = [await queue.get()]
            while len(batch) < MAX_BATCH and not queue.empty():
                batch.append(queue.get_nowait())
            await self._carry(peer, batch)

    async def _carry(self, peer: PeerId, batch: list[Signed]) -> None:
        fault = ""
        for pause in (*PAUSES, None):
            try:
                self._received(peer, await self._deliver(peer, batch, CALL_SECONDS))
                return
            except grpc.aio.AioRpcError as error:
                fault = f"{error.code().name.lower()}: {error.details()}"
            if pause is not None:
                await asyncio.sleep(pause)
        logger.info("gave up %d statements for %s: %s", len(batch), peer, fault)
        self._unreachable(peer, fault)

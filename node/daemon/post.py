"""Carries round statements to other peers: one bounded queue and one worker a peer, so that nobody waits for anybody.

Statements are idempotent at the receiver, and the round machine repeats what matters. A batch that cannot be delivered
is tried again with growing pauses; then the peer is reported as unreachable and all that waits for it is dropped. A
batch that is refused is dropped alone: whoever refuses is there. Replies may carry statements that we seem to lack.
A worker lives only while something waits for its peer, so peers that come and go leave nothing behind.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

from node.daemon.metrics import RecoveredErrorKind
from protocol.errors import PeerFault, UnreachableError
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed

logger = logging.getLogger(__name__)

MAX_QUEUED = 256
MAX_BATCH_MESSAGES = 16
MAX_BATCH_BYTES = 768 * 1024  # of statements; one call takes 1 MiB
CALL_SECONDS = 5.0
RETRY_DELAYS = (0.1, 0.4, 1.0)

Deliver = Callable[[PeerId, Sequence[Signed], float], Awaitable[Iterable[Signed]]]


class Outbox:
    """`deliver(peer, statements, deadline in seconds)` makes the call: UnreachableError where it does not arrive,
    PeerFault where it is refused. `unreachable(peer, reason)` hears of peers that were given up, `broken(error)` of a
    fault in our own code; `set_back` of all that does not arrive.
    """

    def __init__(
        self,
        deliver: Deliver,
        on_reply: Callable[[PeerId, Iterable[Signed]], None],
        on_unreachable: Callable[[PeerId, str], None],
        on_fault: Callable[[BaseException], None],
        record_recovered: Callable[[RecoveredErrorKind, str], None],
    ) -> None:
        self._deliver = deliver
        self._on_reply = on_reply
        self._on_unreachable = on_unreachable
        self._on_fault = on_fault
        self._record_recovered = record_recovered
        self._queues: dict[PeerId, deque[Signed]] = {}
        self._workers: dict[PeerId, asyncio.Task[None]] = {}

    def send(self, peers: Iterable[PeerId], message: Signed) -> None:
        size = message.ByteSize()
        if size > MAX_BATCH_BYTES:
            line = f"a {message.kind} statement of {size} bytes is not sent: no call takes it"
            return self._record_recovered("not delivered", line)
        for peer in peers:
            waiting = self._queues.setdefault(peer, deque())
            if len(waiting) >= MAX_QUEUED:
                self._give_up(peer, "does not take its post")
                continue
            waiting.append(message)
            if peer not in self._workers:
                self._start_worker(peer, waiting)

    def drop_peer(self, peer: PeerId) -> None:
        """Drop what waits for a peer that is gone."""
        self._queues.pop(peer, deque()).clear()
        worker = self._workers.pop(peer, None)
        if worker is not None:
            worker.cancel()

    async def stop(self) -> None:
        workers = list(self._workers.values())
        for peer in list(self._workers):
            self.drop_peer(peer)
        await asyncio.gather(*workers, return_exceptions=True)

    def _start_worker(self, peer: PeerId, queue: deque[Signed]) -> None:
        worker = asyncio.create_task(self._drain_queue(peer, queue), name=f"post to {peer}")
        self._workers[peer] = worker
        worker.add_done_callback(lambda ended: self._on_worker_done(peer, ended))

    def _on_worker_done(self, peer: PeerId, worker: asyncio.Task[None]) -> None:
        if self._workers.get(peer) is worker:
            del self._workers[peer]
            self._queues.pop(peer, None)
        if not worker.cancelled() and (error := worker.exception()) is not None:
            logger.error("the post to %s broke", peer, exc_info=error)
            self._on_fault(error)

    async def _drain_queue(self, peer: PeerId, queue: deque[Signed]) -> None:
        while queue:
            await self._deliver_batch(peer, _take_batch(queue))
        # Here, not when the task has ended: what is sent in between would find a worker that looks no more.
        if self._queues.get(peer) is queue:
            del self._queues[peer], self._workers[peer]

    async def _deliver_batch(self, peer: PeerId, batch: list[Signed]) -> None:
        fault = ""
        for pause in (*RETRY_DELAYS, None):
            try:
                self._on_reply(peer, await self._deliver(peer, batch, CALL_SECONDS))
                return
            except UnreachableError as error:
                fault = str(error)
            except PeerFault as refusal:
                self._record_recovered("not accepted", f"{peer} refused {len(batch)} statements: {refusal}")
                return
            if pause is not None:
                await asyncio.sleep(pause)
        self._give_up(peer, fault, len(batch))

    def _give_up(self, peer: PeerId, reason: str, tried: int = 0) -> None:
        """`tried`: statements that no longer wait, and did not arrive."""
        dropped = tried + len(self._queues.get(peer, ()))
        self._record_recovered("not delivered", f"gave up {dropped} statements for {peer}: {reason}")
        self.drop_peer(peer)
        self._on_unreachable(peer, reason)


def _take_batch(queue: deque[Signed]) -> list[Signed]:
    """As many from the front as one call may carry, at least one."""
    batch = [queue.popleft()]
    size = batch[0].ByteSize()
    while queue and len(batch) < MAX_BATCH_MESSAGES and size + queue[0].ByteSize() <= MAX_BATCH_BYTES:
        batch.append(queue.popleft())
        size += batch[-1].ByteSize()
    return batch

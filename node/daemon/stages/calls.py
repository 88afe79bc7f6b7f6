"""Send calls about microbatches to the peers of all stages. Failed calls raise UnreachableError or PeerFault."""

import asyncio
import logging
import os
import signal
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from node.daemon.peers.peer_rpc import await_reply, call_by_best_channel
from node.injected_faults import Faults, PlaceCounter
from protocol.blobs.blob import Blob
from protocol.errors import UnreachableError
from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.murmur_pb2_grpc import StagesStub
from protocol.pipeline.exact import Statement
from protocol.pipeline.messages import (
    Answer,
    HeldBlob,
    Inputs,
    Outcome,
    Task,
    invitation_to_wire,
    release_to_wire,
)
from protocol.pipeline.owner import ASK_SECONDS
from protocol.pipeline.results import Contradiction
from protocol.recent import RecentTable
from protocol.transport.transport import Transport

logger = logging.getLogger(__name__)

MAX_ANSWERING = 4096  # peers
COPY_SECONDS = 2.0  # before a test's injected copy of a task is sent


class StageCalls:
    """Calls over the channels of a node. Each opens a direct connection, which later calls and downloads use.

    `answering`: the peers that have answered their last call.
    """

    def __init__(self, channels: Transport) -> None:
        self._channels = channels
        self.answering = RecentTable[PeerId, None](MAX_ANSWERING)

    async def ask(self, peer: PeerId, task: Task) -> Answer:
        return Answer.from_wire(await self._call(peer, "Ask", task.to_wire()), peer)

    async def tell(self, peer: PeerId, outcome: Outcome) -> None:
        await self._call(peer, "Tell", outcome.to_wire())

    async def release(self, peer: PeerId, run: RunId, serials: Iterable[int]) -> None:
        await self._call(peer, "Release", release_to_wire(run, serials))

    async def invite(self, peer: PeerId, run: RunId) -> None:
        await self._call(peer, "Invite", invitation_to_wire(run))

    async def state(self, peer: PeerId, statement: Statement) -> None:
        await self._call(peer, "State", statement.to_wire())

    async def contradict(self, peer: PeerId, found: Contradiction) -> None:
        await self._call(peer, "Contradict", found.to_wire())

    async def _call(self, peer: PeerId, method: str, request: Any) -> Any:
        clock = asyncio.get_running_loop().time
        deadline = clock() + ASK_SECONDS
        self._channels.open_direct(peer)

        async def call(channel: Any, seconds: float) -> Any:
            stub = getattr(StagesStub(channel), method)
            return await await_reply(peer, lambda: stub(request, timeout=seconds))

        try:
            reply = await call_by_best_channel(self._channels, peer, call, lambda: deadline - clock())
        except UnreachableError:
            self.answering.pop(peer, None)
            raise
        self.answering[peer] = None
        return reply


class FaultyStageCalls(StageCalls):
    """Calls with faults that a test injects; see `node.injected_faults`."""

    def __init__(self, channels: Transport, faults: Faults) -> None:
        super().__init__(channels)
        self._faults = faults
        self._places = PlaceCounter()
        self._copies: set[asyncio.Task[None]] = set()

    async def ask(self, peer: PeerId, task: Task) -> Answer:
        task = self._spoil_task(task)
        if self._places.is_each("copy", self._faults.copied_tasks):
            copying = asyncio.create_task(self._send_copy(peer, task))
            self._copies.add(copying)
            copying.add_done_callback(self._copies.discard)
        answer = await super().ask(peer, task)
        if self._places.is_each("drop answer", self._faults.dropped_answers):
            raise UnreachableError(f"{peer} does not answer (the answer is dropped by a test)")
        if self._places.is_each("late answer", self._faults.late_answers):
            await asyncio.sleep(ASK_SECONDS)
            raise UnreachableError(f"{peer} does not answer in time (delayed by a test)")
        return answer

    async def tell(self, peer: PeerId, outcome: Outcome) -> None:
        if self._places.is_each("drop outcome", self._faults.dropped_outcomes):
            return
        await super().tell(peer, self._spoil_outcome(outcome))
        if self._faults.point == "told" and self._places.is_nth("told", self._faults.killed_at):
            os.kill(os.getpid(), signal.SIGKILL)

    async def _send_copy(self, peer: PeerId, task: Task) -> None:
        await asyncio.sleep(COPY_SECONDS)
        try:
            answer = await super().ask(peer, task)
        except UnreachableError:
            return
        logger.info("the copy of a task is answered: %s", answer.kind)

    def _spoil_task(self, task: Task) -> Task:
        wrong = self._faults.wrong or ""
        if not wrong.startswith("task") or not self._places.is_nth("task", self._faults.wrong_at):
            return task
        match wrong:
            case "task size":
                return replace(
                    task, inputs=Inputs(**{name: _larger(held) for name, held in task.inputs.named().items()})
                )
            case "task stage":
                return replace(task, run=_other_run(task.run))
        return replace(task, inputs=Inputs(**dict(list(task.inputs.named().items())[1:])))

    def _spoil_outcome(self, outcome: Outcome) -> Outcome:
        wrong = self._faults.wrong or ""
        if not wrong.startswith("result") or outcome.result is None:
            return outcome
        if not self._places.is_nth("result", self._faults.wrong_at):
            return outcome
        if wrong == "result size":
            return replace(outcome, result=Blob(outcome.result.digest, outcome.result.size + 1))
        return replace(outcome, run=_other_run(outcome.run))


def _larger(held: HeldBlob) -> HeldBlob:
    return HeldBlob(Blob(held.blob.digest, held.blob.size + 1), held.holder)


def _other_run(run: RunId) -> RunId:
    return ("0" if run[0] != "0" else "1") + run[1:]


def stage_calls(channels: Transport, faults: Faults | None) -> StageCalls:
    """Return the calls of a node, with faults if a test injects some."""
    return StageCalls(channels) if faults is None else FaultyStageCalls(channels, faults)

"""Calls about microbatches that a test makes fail; see `node.injected_faults`."""

import asyncio
import logging
import os
import signal
from dataclasses import replace

from node.daemon.stages.calls import StageCalls, StageChannels
from node.injected_faults import Faults, PlaceCounter
from protocol.blobs.blob import Blob
from protocol.errors import UnreachableError
from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.pipeline.messages import Answer, HeldBlob, Inputs, Outcome, Task
from protocol.pipeline.owner import ASK_SECONDS

COPY_SECONDS = 2.0  # until the copy of a task is sent
logger = logging.getLogger(__name__)


def stage_calls(channels: StageChannels, faults: Faults | None) -> StageCalls:
    """Return the calls of a node, with faults if a test injects some."""
    return StageCalls(channels) if faults is None else FaultyStageCalls(channels, faults)


class FaultyStageCalls(StageCalls):
    """Calls with faults. A fault that needs a peer counts calls to other peers only."""

    def __init__(self, channels: StageChannels, faults: Faults) -> None:
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

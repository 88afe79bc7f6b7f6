"""A trainer that sleeps as long as a device would compute, and writes results of the right size."""

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable

from node.trainer.ipc.activation_memory import ActivationMemory
from node.trainer.ipc.channel import FromTrainer, ToTrainer
from node.trainer.ipc.stage_messages import (
    ComputeStage,
    DrawMicrobatch,
    MicrobatchDrawn,
    StageComputed,
    StageStepped,
    TakeStageStep,
)

FORWARD_SHARE = 0.25  # of the time of a microbatch; the backward pass computes the forward pass again
FRESH_BYTES = 16  # of each result, so that no two are equal


class SleepingTrainer:
    """Takes commands in their order, on a thread of its own; `rate` is in microbatches a second."""

    def __init__(self, memory: ActivationMemory, rate: float) -> None:
        self.rate = rate
        self._memory = memory
        self._noise = os.urandom(max(memory.sizes.activation_bytes, memory.sizes.token_bytes))  # not compressible
        self._commands: queue.SimpleQueue[ToTrainer] = queue.SimpleQueue()

    async def send(self, message: ToTrainer) -> bool:
        """Queue a command."""
        self._commands.put(message)
        return True

    def start(self, receive: Callable[[FromTrainer], object]) -> None:
        """Begin to work; `receive` gets the answers, on the event loop."""
        loop = asyncio.get_running_loop()

        def work() -> None:
            while True:
                loop.call_soon_threadsafe(receive, self._carry_out(self._commands.get()))

        threading.Thread(target=work, daemon=True).start()

    def _carry_out(self, command: ToTrainer) -> FromTrainer:
        match command:
            case DrawMicrobatch():
                self._fill(command.slot)
                return MicrobatchDrawn(serial=command.serial)
            case ComputeStage():
                return self._compute(command)
            case TakeStageStep():
                return StageStepped()
        raise ValueError(f"a stage's trainer takes no {command.kind}")

    def _compute(self, command: ComputeStage) -> StageComputed:
        seconds = (1 - FORWARD_SHARE if command.is_backward else FORWARD_SHARE) / self.rate
        time.sleep(seconds)
        if command.output is not None:
            self._fill(command.output)
        return StageComputed(task=command.task, seconds=seconds)

    def _fill(self, slot: int) -> None:
        view = self._memory.slot(slot)
        view[:] = self._noise[: len(view)]
        view[:FRESH_BYTES] = os.urandom(FRESH_BYTES)

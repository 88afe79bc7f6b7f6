"""The work of a stage that a test makes fail; see `node.injected_faults`."""

import os
import signal
import time

import torch

from node.data import BatchReader
from node.injected_faults import Faults, PlaceCounter, injected_faults
from node.model import LanguageModel
from node.trainer.ipc.activation_memory import ActivationMemory
from node.trainer.ipc.stage_messages import ComputeStage, DrawMicrobatch, MicrobatchDrawn, StageComputed
from node.trainer.stages.stage_work import ExactStep, StageWork
from protocol.manifest.run import Manifest
from protocol.pipeline.ledger import StepLedger

NO_TOKEN = 2**31 - 1


class FaultClock:
    """Kills this process, or its daemon, at the computation that the faults name, and slows computations down."""

    def __init__(self, faults: Faults, is_restarted: bool, daemon: int) -> None:
        self._faults = faults
        self._point = None if is_restarted and faults.victim == "trainer" else faults.point
        self._daemon = daemon
        self._places = PlaceCounter()

    def reach(self, point: str) -> None:
        """Die here, if it is time."""
        if self._point != point or not self._places.is_nth(point, self._faults.killed_at):
            return
        if self._faults.victim == "node":
            os.kill(self._daemon, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def slow_down(self, seconds: float) -> float:
        """Wait as a slower device would; return the seconds that a computation of `seconds` then takes."""
        time.sleep((self._faults.slow - 1) * seconds)
        return self._faults.slow * seconds

    @property
    def adds_always(self) -> bool:
        """Return whether an exact step adds every gradient, however often."""
        return self._faults.adds == "always"

    def is_wrong(self, *words: str) -> bool:
        """Return whether this result is the one to spoil."""
        return self._faults.wrong in words and self._places.is_nth("wrong", self._faults.wrong_at)

    @property
    def wrong_bytes(self) -> bytes:
        """Return bytes that are not finite as fp32 and as bf16, and no scale as int8."""
        return b"\xff" if self._faults.wrong == "nan" else b"\x00\x00\x80\x7f"


class FaultyStageWork(StageWork):
    """The work of one stage, with faults. `fault_clock` is set before the first task."""

    fault_clock: FaultClock

    def draw(self, command: DrawMicrobatch) -> MicrobatchDrawn:
        drawn = super().draw(command)
        if self.fault_clock.is_wrong("token"):
            torch.frombuffer(self._memory.slot(command.slot), dtype=torch.int32, count=1).fill_(NO_TOKEN)
        return drawn

    def compute(self, command: ComputeStage) -> StageComputed:
        self.fault_clock.reach("backward" if command.is_backward else "forward")
        computed = super().compute(command)
        if command.adds:
            self.fault_clock.reach("added")
        seconds = self.fault_clock.slow_down(computed.seconds)
        if command.output is not None and self.fault_clock.is_wrong("nan", "inf"):
            view = self._memory.slot(command.output)
            view[:] = (self.fault_clock.wrong_bytes * len(view))[: len(view)]
        return computed.model_copy(update={"seconds": seconds})

    def _count_exactly(self, exact: ExactStep, command: ComputeStage, loss: float | None) -> None:
        """Add a gradient that counts already, or that another peer counts, without an entry in the ledger."""
        is_naive = self.fault_clock.adds_always and not command.adds and not command.takes_away
        if not is_naive or command.number is None:
            super()._count_exactly(exact, command, loss)
            return
        honest = exact.ledger
        exact.ledger = StepLedger(honest.count)
        super()._count_exactly(exact, command.model_copy(update={"adds": True}), loss)
        exact.ledger = honest


def build_stage_work(
    manifest: Manifest, model: LanguageModel, memory: ActivationMemory, batches: BatchReader, is_restarted: bool
) -> StageWork:
    """Build the work of a stage, with faults if a test injects some. Raises UsageError."""
    faults = injected_faults(os.environ, manifest.run.name)
    if faults is None:
        return StageWork(manifest, model, memory, batches)
    faulty = FaultyStageWork(manifest, model, memory, batches)
    faulty.fault_clock = FaultClock(faults, is_restarted, daemon=os.getppid())
    return faulty

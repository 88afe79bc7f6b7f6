"""A trainer whose weights are the list of the microbatches in them: the truth with which counters are compared.

The tokens of a microbatch are its name, and so is each activation that follows from them. The trainer writes a journal
of what it adds, steps, saves and contributes; a restarted one goes on from its last snapshot, as the product does.
"""

import json
import os
import signal
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from node.injected_faults import parse_faults
from node.trainer.ipc.activation_memory import ActivationMemory, SlotSizes
from node.trainer.ipc.channel import ChannelClosed, ContributionHeader, Ready, ToTrainer, TrainerChannel
from node.trainer.ipc.stage_messages import (
    ComputeStage,
    DrawMicrobatch,
    MicrobatchDrawn,
    StageComputed,
    StageStepped,
    TakeStageStep,
)
from node.trainer.stages.faulty_stage import FaultClock
from protocol.errors import MalformedError
from protocol.pipeline.ledger import Ledger
from protocol.pipeline.messages import Input, Key

WAIT_SECONDS = 1.0
NOT_FINITE = "not finite"
FATAL = "fatal"  # tokens of which a trainer dies in native code


@dataclass
class Truth:
    """What the weights of a stage's peer contain, by its journal."""

    weights: Counter[str] = field(default_factory=Counter)
    gradient: list[str] = field(default_factory=list)
    snapshot: Counter[str] = field(default_factory=Counter)
    contributed: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)  # was added, and died with a trainer
    stale: int = 0  # most steps between the two passes of a microbatch
    steps: int = 0

    def apply(self, line: str) -> None:
        """Take one line of the journal."""
        word, _, name = line.partition(" ")
        match word:
            case "add":
                self.gradient.append(name)
            case "step":
                self.weights.update(self.gradient)
                self.gradient = []
                self.steps += 1
            case "stale":
                self.stale = max(self.stale, int(name))
            case "snapshot":
                self.snapshot = Counter(self.weights)
            case "contribute":
                self.contributed = Counter(self.weights)
            case "start":
                self.lost += (self.weights - self.snapshot).elements()
                self.lost += self.gradient
                self.weights, self.gradient = Counter(self.snapshot), []

    @property
    def unsent(self) -> Counter[str]:
        """Return what the snapshot has and no contribution."""
        return self.snapshot - self.contributed

    @property
    def counted(self) -> Counter[str]:
        """Return the microbatches in the weights and in the open gradient."""
        return self.weights + Counter(self.gradient)

    @classmethod
    def read(cls, path: Path) -> "Truth":
        truth = cls()
        for line in path.read_text().splitlines() if path.exists() else ():
            truth.apply(line)
        return truth


def key_of(name: str) -> Key:
    owner, _, serial = name.partition("/")
    return Key(owner, int(serial))


class TallyTrainer:
    """`words`: journal, stage, stages, seconds of a microbatch, steps of a snapshot and of a contribution, faults."""

    def __init__(self, words: dict[str, Any], channel: TrainerChannel, memory: ActivationMemory) -> None:
        self._words = words
        self._channel = channel
        self._memory = memory
        self._journal = os.open(words["journal"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._truth = Truth.read(Path(words["journal"]))
        is_restarted = bool(self._truth.steps or self._truth.gradient or words["start"])
        faults = parse_faults(words["faults"]) if words["faults"] else None
        self._clock = FaultClock(faults, is_restarted, words["daemon"]) if faults else None
        self._forwarded: dict[str, int] = {}  # steps when the forward pass was made

    def run(self) -> None:
        self._write("start")
        ready = Ready(device="none", step=self._truth.steps, round=0, outstanding=None, start=self._words["start"])
        ledgers = {"ledger": self._truth.unsent, "contributed": self._truth.contributed}
        texts = {name: Ledger(map(key_of, names)).to_text() for name, names in ledgers.items()}
        self._channel.send(ready.model_copy(update=texts))
        while True:
            command = self._channel.receive(WAIT_SECONDS)
            if command is not None:
                self._carry_out(command)

    def _carry_out(self, command: ToTrainer) -> None:
        match command:
            case DrawMicrobatch() | ComputeStage() | TakeStageStep() if command.start != self._words["start"]:
                return  # it was for the trainer before this one
            case DrawMicrobatch():
                self._put(command.slot, f"{self._words['owner']}/{command.serial}")
                self._channel.send(MicrobatchDrawn(serial=command.serial))
            case ComputeStage():
                self._reach("backward" if command.is_backward else "forward")
                self._channel.send(self._compute(command))
            case TakeStageStep():
                self._step()
            case _:
                raise MalformedError(f"a trainer of a stage takes no {command.kind}")

    def _compute(self, command: ComputeStage) -> StageComputed:
        name = self._get(command.activation if command.activation is not None else command.tokens)
        if name == FATAL:
            os.kill(os.getpid(), signal.SIGSEGV)
        given = name if command.gradient is None else self._get(command.gradient)
        seconds = self._words["seconds"] * (0.75 if command.is_backward else 0.25)
        time.sleep(seconds)
        if NOT_FINITE in (name, given):
            first: Input = "tokens" if command.activation is None else "activation"
            wrong: Input = first if name == NOT_FINITE else "gradient"
            return StageComputed(task=command.task, seconds=seconds, fault="wrong input", wrong=wrong)
        if name.split(" ")[0] != given.split(" ")[0]:
            raise AssertionError(f"the gradient of {given} for {name}")
        microbatch = name.split(" ")[0]
        self._count(command, microbatch)
        if self._clock is not None:
            seconds = self._clock.slow_down(seconds)
        if command.output is not None:
            is_wrong = self._clock is not None and self._clock.is_wrong("nan", "inf")
            way = "backward" if command.is_backward else "forward"
            self._put(command.output, NOT_FINITE if is_wrong else f"{microbatch} {way} {self._words['stage']}")
        is_last = self._words["stage"] == self._words["stages"] - 1
        return StageComputed(task=command.task, seconds=seconds, loss=1.0 if is_last and command.is_backward else None)

    def _count(self, command: ComputeStage, microbatch: str) -> None:
        if not command.is_backward:
            self._forwarded[microbatch] = self._truth.steps
        elif command.adds:
            self._write(f"add {microbatch}")
            self._reach("added")
            self._write(f"stale {self._truth.steps - self._forwarded.pop(microbatch, self._truth.steps)}")

    def _step(self) -> None:
        self._write("step")
        if self._truth.steps % self._words["snapshot_steps"] == 0:
            self._write("snapshot")
        self._channel.send(StageStepped())
        if self._words["contribution_steps"] and self._truth.steps % self._words["contribution_steps"] == 0:
            self._write("snapshot")
            self._write("contribute")
            self._channel.send(ContributionHeader(round=0, sizes=(), tokens=0, steps=0, loss=0.0))

    def _reach(self, point: str) -> None:
        if self._clock is not None:
            self._clock.reach(point)

    def _write(self, line: str) -> None:
        os.write(self._journal, (line + "\n").encode())
        self._truth.apply(line)

    def _get(self, slot: int | None) -> str:
        assert slot is not None
        return bytes(self._memory.slot(slot)).rstrip(b"\0").decode()

    def _put(self, slot: int, text: str) -> None:
        view = self._memory.slot(slot)
        view[:] = text.encode().ljust(len(view), b"\0")


def main(words: dict[str, Any], fds: list[int]) -> None:
    """Run until the daemon closes the channel."""
    channel = TrainerChannel(socket.socket(fileno=fds[0]))
    memory = ActivationMemory.attach(fds[1], SlotSizes.model_validate_json(json.dumps(words["slots"])))
    try:
        TallyTrainer(words, channel, memory).run()
    except ChannelClosed:
        return

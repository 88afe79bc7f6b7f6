"""A trainer link whose trainer process is scripted by the test."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

from node.daemon.state.contributions import ContributionFile, ContributionIntake
from node.daemon.state.outer_state import TrainerAnchors
from node.daemon.trainer_link import TrainerLink
from node.loop.contributions import ContributionTracker
from node.step_settings import step_settings
from node.trainer.ipc.channel import (
    ApplyAnchor,
    ContributionHeader,
    FromTrainer,
    Ready,
    ToTrainer,
)
from node.trainer.ipc.shared_memory import SharedLayout, SharedMemory
from protocol.blobs.blob import Blob
from protocol.consensus.chain import ChainHead
from tests.node.daemon.recorded_errors import RecordedErrors
from tests.node.small_run import MANIFEST, PEERS, PROGRAM, at_once, commit_of, store_in, until

NUMEL = 8
SETTINGS = step_settings(MANIFEST, 0, 0)
ME = PEERS[1].peer_id


class ScriptedProcess:
    """In the place of TrainerProcess: the test speaks for the trainer."""

    def __init__(self) -> None:
        self.crash_count = 0
        self.is_absent = False
        self.handing_over = asyncio.Lock()
        self.heard: list[ToTrainer] = []
        self.failure: Exception | None = None
        self.stopped = False
        self.round = 0
        self._queue: asyncio.Queue[FromTrainer | None] = asyncio.Queue()

    async def start(self) -> None:
        pass

    async def send(self, message: ToTrainer) -> bool:
        self.heard.append(message)
        return True

    async def messages(self) -> AsyncIterator[FromTrainer]:
        while (message := await self._queue.get()) is not None:
            yield message
        if self.failure is not None:
            raise self.failure

    async def stop(self) -> None:
        self.stopped = True
        self._queue.put_nowait(None)

    def say(self, message: FromTrainer | None) -> None:
        self._queue.put_nowait(message)

    @property
    def adopts(self) -> list[tuple[int, str]]:
        return [(message.round, message.outcome) for message in self.heard if isinstance(message, ApplyAnchor)]


class AnchorsAlone(TrainerAnchors):
    """The anchors of a memory that has no vectors of a trainer, so that no change of them can be unfinished."""

    async def finish_change(self) -> None:
        pass


class TrainerLinkSetup:
    def __init__(self, folder: Path) -> None:
        self.process = ScriptedProcess()
        self.arena = SharedMemory.create(SharedLayout(NUMEL, (("weights", NUMEL),), 64))
        self.store = store_in(folder / "blobs")
        self.heard: list[FromTrainer] = []
        self.errors = RecordedErrors()
        self.offers = ContributionTracker(PROGRAM)
        self.sent = ContributionFile(folder / "offer.json")
        self.head = ChainHead(0, bytes(32), 0)
        self.work: Callable[..., Awaitable[Any]] = at_once
        process: Any = self.process
        in_thread = lambda *call: self.work(*call)  # noqa: E731
        self.intake = ContributionIntake(self.offers, self.store, self.arena, self.sent, in_thread)
        anchors = AnchorsAlone(self.arena, PROGRAM, in_thread)
        self.link = TrainerLink(process, anchors, self.intake, self.steps_for, self.on_trainer_message, self.errors)

    def steps_for(self, number: int) -> int:
        return 5

    def on_trainer_message(self, message: FromTrainer) -> None:
        self.heard.append(message)

    async def begin(self, round_number: int = 0) -> None:
        await self.link.start(round_number, [torch.full((NUMEL,), float(round_number))], SETTINGS)

    async def say(self, *messages: FromTrainer) -> None:
        wanted = len(self.heard) + len(messages)
        for message in messages:
            self.process.say(message)
        await until(lambda: len(self.heard) == wanted)

    async def message(self, number: int, text: bytes = b"abcdef") -> ContributionHeader:
        self.arena.contribution_buffer[: len(text)] = text
        made = ContributionHeader(round=number, sizes=(4, len(text) - 4), tokens=100, steps=5, loss=3.0)
        await self.say(made)
        return made

    async def decide(self, number: int, included: bool) -> str:
        """The round after `number` is decided and handed to the trainer."""
        offer = self.offers.pending
        messages: dict[int, Blob | tuple[Blob, ...]] = {0: self.store.put(b"other")}
        if included and offer:
            messages[1] = offer.parts
        commit = commit_of(ChainHead(number, bytes(32), 0), messages)
        fate = self.offers.on_commits(ME, [commit.body], number + 1)
        await self.link.apply_anchor(number + 1, [torch.full((NUMEL,), number + 1.0)], SETTINGS)
        return fate


def ready(number: int, outstanding: int | None = None) -> Ready:
    return Ready(device="cpu", step=0, round=number, outstanding=outstanding)

"""The daemon's dealings with its trainer: anchors in, messages out, over any number of trainer deaths.

The anchor of round r lies in the arena's buffer r % 2. It is written only once the trainer has adopted round r - 1, so
a trainer never reads a buffer that changes under it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from torch import Tensor

from node.arena import Arena
from node.channel import (
    Adopt,
    Adopted,
    Evaluate,
    Evaluated,
    Fate,
    FromTrainer,
    Message,
    Progress,
    Ready,
)
from node.offers import Offer, Offers
from node.trainer_process import TrainerProcess
from protocol.blob_store import BlobStore
from protocol.blobs import Blob
from protocol.identity import PeerId
from protocol.statements import Commit

logger = logging.getLogger(__name__)

ADOPTION_SECONDS = 60.0
LAST_ADOPTION_SECONDS = 5.0


class TrainerLink:
    """`heard` is called after every message of the trainer; a new message of its lies in `offers` then."""

    def __init__(
        self, me: PeerId, process: TrainerProcess, arena: Arena, store: BlobStore, offers: Offers,
        work: Callable[..., Awaitable[Any]], heard: Callable[[FromTrainer], None],
    ) -> None:  # fmt: skip
        self._me, self._process, self._arena, self._store = me, process, arena, store
        self.offers = offers
        self._work, self._heard = work, heard
        self._round = 0
        self._started = asyncio.Event()
        self._adopted = asyncio.Condition()
        self._adopted_round = 0
        self._listener: asyncio.Task[None] | None = None
        self.placing = asyncio.Lock()  # held while blobs are put that no offer names yet

    @property
    def deaths(self) -> int:
        return self._process.deaths

    @property
    def round(self) -> int:
        """Of the anchor that the trainer was last told of."""
        return self._round

    async def start(self, round_number: int, anchor: Tensor) -> None:
        self._round = self._adopted_round = round_number
        self._arena.anchor(round_number).copy_(anchor)
        await self._process.start()
        self._listener = asyncio.create_task(self._listen(), name="trainer link")
        self._started.set()

    async def finished(self) -> None:
        """Ends only with the trainer: raises what made it fail for good."""
        await self._started.wait()
        assert self._listener is not None
        await asyncio.shield(self._listener)

    async def stop(self, round_number: int) -> None:
        """The trainer adopts that round, writes a last snapshot and ends; nothing of it is left."""
        if self._listener is None:
            return
        if not await self.has_adopted(round_number, LAST_ADOPTION_SECONDS):
            logger.warning("the trainer stops before it has adopted round %d", round_number)
        await self._process.stop()
        await asyncio.wait({self._listener}, timeout=ADOPTION_SECONDS)

    def settle(self, commits: Iterable[Commit]) -> Fate:
        """What these commits, in order, mean for the message that is on its way."""
        fates = [self.offers.settle(self._me, commit) for commit in commits]
        return next((fate for fate in fates if fate != "none"), "none")

    async def adopt(self, round_number: int, anchor: Tensor, fate: Fate) -> None:
        """Hand the trainer a new anchor, and the fate of its message."""
        if self._listener is None:
            return
        if not await self.has_adopted(self._round):
            logger.warning("the trainer has not adopted round %d for %g s", self._round, ADOPTION_SECONDS)
        self._arena.anchor(round_number).copy_(anchor)
        self._round = round_number
        await self._process.send(Adopt(round=round_number, fate=fate))

    async def has_adopted(self, round_number: int, seconds: float = ADOPTION_SECONDS) -> bool:
        """True as well before the trainer's first start: it will be greeted with whatever was decided until then."""
        if self._listener is None:
            return True
        try:
            async with asyncio.timeout(seconds), self._adopted:
                await self._adopted.wait_for(lambda: self._adopted_round >= round_number)
        except TimeoutError:
            return False
        return True

    async def evaluate(self) -> None:
        """Ask for the validation loss of the newest anchor; the answer comes through `heard`."""
        await self._process.send(Evaluate(round=self._round))

    async def _listen(self) -> None:
        async for message in self._process.messages():
            match message:
                case Ready():
                    await self._greet(message)
                case Message():
                    await self._take(message)
                case Adopted():
                    async with self._adopted:
                        self._adopted_round = max(self._adopted_round, message.round)
                        self._adopted.notify_all()
                case Progress() | Evaluated():
                    pass
            self._heard(message)

    async def _greet(self, ready: Ready) -> None:
        """A trainer that (re)started may be behind, or wait for a fate that was decided meanwhile."""
        fate = self.offers.fate_of(ready.outstanding)
        if ready.round != self._round or fate != "none":
            await self._process.send(Adopt(round=self._round, fate=fate))
        else:
            async with self._adopted:
                self._adopted_round = max(self._adopted_round, ready.round)
                self._adopted.notify_all()

    async def _take(self, message: Message) -> None:
        """Put the parts of a new message where others can fetch them."""
        if self.offers.is_known(message):
            return
        async with self.placing:
            parts: list[Blob] = []
            start = 0
            for size in message.sizes:
                parts.append(await self._work(self._store.put, bytes(self._arena.outbox[start : start + size])))
                start += size
            self.offers.place(Offer(message, tuple(parts)))

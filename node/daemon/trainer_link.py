"""The daemon's dealings with its trainer: anchors in, messages out, over any number of trainer deaths.

The anchor of round r lies in the arena's buffer r % 2. It is written only once the trainer has adopted round r - 1, so
a trainer never reads a buffer that changes under it.

A fate goes out in one Adopt only: to a trainer that has that message outstanding. Said twice, it would be taken for
that of the next message. So nothing is sent to a trainer between its death and its Ready; the greeting tells it all.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
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
    Hurry,
    Message,
    Mishap,
    Pausing,
    Progress,
    Ready,
    Revised,
)
from node.daemon.metrics import Setback
from node.daemon.offer_file import OfferFile
from node.daemon.offers import Offer, Offers, Past, Sent, Verdict
from node.daemon.trainer_process import TrainerProcess
from protocol.blobs.blob import Blob
from protocol.blobs.store import BlobStore
from protocol.identity import PeerId
from protocol.rounds.chain import Head
from protocol.rounds.statements import Commit

ADOPTION_SECONDS = 60.0
LAST_ADOPTION_SECONDS = 5.0


class TrainerLink:
    """`heard` is called after every message of the trainer; a new message of its lies in `offers` then.
    `steps`: how many to make for a round by its number."""

    def __init__(
        self, me: PeerId, process: TrainerProcess, arena: Arena, store: BlobStore, offers: Offers, sent: OfferFile,
        work: Callable[..., Awaitable[Any]], heard: Callable[[FromTrainer], None], steps: Callable[[int], int],
        set_back: Callable[[Setback, str], None],
    ) -> None:  # fmt: skip
        self._me = me
        self._process = process
        self._arena = arena
        self._store = store
        self.offers = offers
        self._sent = sent
        self._work = work
        self._heard = heard
        self._steps = steps
        self._set_back = set_back
        self._round = 0
        self._started = asyncio.Event()
        self._changed = asyncio.Condition()  # of the two below
        self._running = False
        self._adopted_round = 0
        self._greeted = -1  # deaths before the life that said Ready last
        self._outstanding: int | None = None  # round of the message whose fate the living trainer waits for
        self._repeated: int | None = None  # the same, where it will send that message again
        # Earlier fates have changed: until it has heard of that, it sends too much or too little, which is not offered.
        self._revises = bool(self._revised())
        self._revision_told = False
        self._listener: asyncio.Task[None] | None = None
        self.placing = asyncio.Lock()  # held while blobs are put that no offer names yet

    @property
    def deaths(self) -> int:
        return self._process.deaths

    @property
    def trouble(self) -> str:
        """Why no trainer is at work; empty where one is."""
        return self._process.trouble

    @property
    def round(self) -> int:
        """Of the anchor that the trainer was last told of."""
        return self._round

    async def start(self, round_number: int, shared: Sequence[Tensor]) -> None:
        self._round = self._adopted_round = round_number
        self._arena.write_anchor(round_number, shared)
        await self._process.start()
        self._running = True
        self._listener = asyncio.create_task(self._listen(), name="trainer link")
        self._started.set()

    async def finished(self) -> None:
        """Ends only with the trainer: raises what made it fail for good."""
        await self._started.wait()
        assert self._listener is not None
        await asyncio.shield(self._listener)

    async def stop(self, round_number: int) -> None:
        """The trainer adopts that round, writes a last snapshot and ends; nothing of it is left."""
        if not await self.has_adopted(round_number, LAST_ADOPTION_SECONDS):
            self._set_back("not adopted", f"the trainer stops before it has adopted round {round_number}")
        await self._process.stop()
        if self._listener is not None:
            await asyncio.wait({self._listener}, timeout=LAST_ADOPTION_SECONDS)
        async with self._changed:
            self._running = False
            self._changed.notify_all()

    def settle(self, commits: Sequence[Commit], number: int) -> Fate:
        """What these commits, in order, mean for the message that is on its way, and that we stand before `number`."""
        return self.offers.reach(self._me, commits, number)

    def jump(self, commits: Sequence[Commit], number: int, left: Head) -> Verdict:
        """The same where we took over the state before `number`. `commits`: what is known of that chain."""
        verdict = self.offers.jump(self._me, commits, number, left)
        if verdict.revised:
            self._revises = True
            self._revision_told = False
        return verdict

    async def adopt(self, round_number: int, shared: Sequence[Tensor]) -> None:
        """Hand the trainer a new anchor, and the fate of its message if that is decided."""
        if not self._running:
            return
        while not await self.has_adopted(self._round, ADOPTION_SECONDS):  # one that is stuck is started again
            line = f"the trainer has not adopted round {self._round} for {ADOPTION_SECONDS:g} s"
            self._set_back("not adopted", line)
        await self._work(self._arena.write_anchor, round_number, shared)
        self._round = round_number
        self.offers.arrive(round_number)  # a message may have come while the copy was under way
        # On another chain the number may be lower, and is not adopted yet for all that.
        self._adopted_round = min(self._adopted_round, round_number - 1)
        if self._process.deaths == self._greeted:
            await self._tell()

    async def has_adopted(self, round_number: int, seconds: float = ADOPTION_SECONDS) -> bool:
        """Also true where no trainer runs: its snapshot lies still, and the greeting of the next one tells the rest."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self._adopted_round >= round_number or not self._running)
        except TimeoutError:
            return False
        return True

    async def evaluate(self) -> None:
        """Ask for the validation loss of the newest anchor; the answer comes through `heard`."""
        await self._process.send(Evaluate(round=self._round))

    async def hurry(self) -> None:
        """Ask for what it has made for the round that it stands at."""
        await self._process.send(Hurry(round=self._round))

    async def _listen(self) -> None:
        async for message in self._process.messages():
            match message:
                case Ready():
                    await self._greet(message)
                case Message():
                    await self._take(message)
                case Adopted():
                    await self._note_adopted(message.round)
                case Progress() | Evaluated() | Pausing() | Mishap():
                    pass
            self._heard(message)

    async def _greet(self, ready: Ready) -> None:
        """A trainer that (re)started may be behind, or wait for a fate that was decided meanwhile."""
        self._greeted = self._process.deaths
        self._outstanding = ready.outstanding
        self._repeated = ready.outstanding
        if ready.round != self._round or self.offers.fate_of(ready.outstanding) != "none" or self._revised():
            await self._tell()
        else:
            await self._note_adopted(ready.round)

    async def _tell(self) -> None:
        fate = self.offers.fate_of(self._outstanding)
        if fate != "none":
            self._outstanding = None
        self._revision_told = self._revises
        steps = self._steps(self._round)
        await self._process.send(Adopt(round=self._round, fate=fate, steps=steps, revised=self._revised()))

    def _revised(self) -> tuple[Revised, ...]:
        return tuple(
            Revised(message=entry.offer.message, parts=tuple(blob.name for blob in entry.offer.parts), fate=entry.fate)
            for entry in self.offers.past
            if entry.was is not None
        )

    async def _note_adopted(self, round_number: int) -> None:
        if self._revision_told and round_number == self._round:
            self._revises = self._revision_told = False
        if round_number <= self._round:  # a greater one is of the chain that we left
            async with self._changed:
                self._adopted_round = max(self._adopted_round, round_number)
                self._changed.notify_all()

    async def _take(self, message: Message) -> None:
        """Put the parts of a new message where others can fetch them."""
        repeated, self._repeated = self._repeated == message.round, None
        if repeated and self.offers.is_known(message):
            return
        self._outstanding = message.round
        async with self.placing:
            past = None if self._revises else tuple(self.offers.past)
            offer = await self._work(self._stored, message, past)
            if self._revises:
                self._set_back("given back", f"the message of round {message.round} is of the chain that was left")
                self.offers.refuse(offer, self._round)
            else:
                self.offers.place(offer, self._round)
        # Made for a round that was decided meanwhile: the one that is open may be unable to take it.
        self.offers.arrive(self._round)
        if self.offers.current is None and self._process.deaths == self._greeted:
            await self._tell()

    def _stored(self, message: Message, past: tuple[Past, ...] | None) -> Offer:
        """`past`: the messages before it; None: it is not to be offered."""
        offer = Offer(message, stored_parts(self._store, self._arena, message))
        if past is not None:
            self._sent.save(Sent(offer, past))
        return offer


def stored_parts(store: BlobStore, arena: Arena, message: Message) -> tuple[Blob, ...]:
    """The parts of the message in the outbox as blobs in the store."""
    return tuple(store.put(part) for part in arena.outbox_parts(message.sizes))

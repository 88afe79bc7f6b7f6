"""Keeps on disk what the next start needs, and in the blob store what others may still ask for.

A checkpoint is written in the background, after every round or every few (`checkpoint.every_rounds`). The one after it
waits for that, so that a kill at any moment finds on disk the last or the last but one that was due.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from node.arena import Arena
from node.checkpoints import checkpoint
from node.checkpoints.checkpoint import Checkpoint
from node.daemon.metrics import Setback
from node.daemon.offers import Offers
from node.daemon.replica import OuterState, Replica
from node.daemon.resumption import OUTBOX
from node.daemon.workers import Work
from node.folder import RunFolder
from node.model import ShapeTable
from protocol.blobs.blob import Blob
from protocol.blobs.store import BlobStore
from protocol.errors import StorageError
from protocol.manifest import Manifest
from protocol.rounds.chain import Head
from protocol.rounds.statements import Commit

logger = logging.getLogger(__name__)

KEPT_ROUNDS = 4  # whose blobs a peer that lags may still fetch, where there is room
MAX_STATES = 6  # with those that somebody is still fetching


class Keeper:
    """`work` runs a function in a thread that may be busy for long; `adopted(round)` waits for the trainer; `wanted`
    names the blobs that others are fetching, `carried` those that we hold for them, or may need in the next round.
    `room`: bytes that the blobs of past rounds may take; where many peers exchange dense messages that is for fewer
    rounds, and whoever lags by more fetches a state."""

    def __init__(
        self, folder: RunFolder, manifest: Manifest, shapes: ShapeTable, store: BlobStore, arena: Arena,
        work: Work, adopted: Callable[[int], Awaitable[bool]], wanted: Callable[[], Collection[bytes]],
        carried: Callable[[], Collection[bytes]], set_back: Callable[[Setback, str], None], room: int,
    ) -> None:  # fmt: skip
        self._folder = folder
        self._manifest = manifest
        self._shapes = shapes
        self._store = store
        self._arena = arena
        self._work = work
        self._adopted = adopted
        self._wanted = wanted
        self._carried = carried
        self._set_back = set_back
        self._room = room
        self._rounds: deque[dict[bytes, int]] = deque(maxlen=KEPT_ROUNDS)  # the sizes of their blobs
        self._states: list[bytes] = []  # oldest first
        self._saving: asyncio.Task[None] | None = None
        self.trouble = ""  # why the newest checkpoint is not on disk; empty: it is

    async def replace(self, state: Blob) -> None:
        """There is a new state, in memory anyway. One before it goes to the disk if a slow peer is in the middle of it
        (which would never arrive otherwise), and else with the memory that it lies in."""
        wanted = self._wanted()
        older = [digest for digest in self._states if digest in wanted and digest != state.digest][: MAX_STATES - 1]
        for digest in older:
            await self._write_out(digest)
        self._states = [*older, state.digest]

    def prune(self, offers: Offers, commits: Iterable[Commit]) -> None:
        """After a round (or a jump): drop the blobs that nobody should still ask for."""
        self._rounds.extend({blob.digest: blob.size for blob in commit.blobs} for commit in commits)
        while len(self._rounds) > 1 and sum(sum(sizes.values()) for sizes in self._rounds) > self._room:
            self._rounds.popleft()
        offered = (part.digest for part in offers.parts)
        self._store.retain(set().union(*self._rounds, self._states, offered, self._carried()))

    async def _write_out(self, digest: bytes) -> None:
        try:
            await self._work(self._store.write_out, digest)
        except StorageError as error:
            self._set_back("state gone", f"who is fetching an earlier state has to begin anew: {error}")
            self._store.discard(digest)

    async def keep(self, replica: Replica, offers: Offers) -> None:
        """Save in the background, where the manifest says so; returns once the save before this one is on disk."""
        if self._is_to_save(replica):
            await self.saved()
            self._saving = asyncio.create_task(self._save(_Moment.of(replica, offers)), name="checkpoint")

    async def ready(self, replica: Replica) -> None:
        """For people and peers to hear of its round: a kill may take back one that was told, and no two."""
        if self._is_to_save(replica):
            await self.saved()

    def _is_to_save(self, replica: Replica) -> bool:
        return replica.chain.round % self._manifest.checkpoint.every_rounds == 0

    async def saved(self) -> None:
        """The save under way, if there is one, is on disk, or has failed with a line in the log."""
        if self._saving is not None:
            await asyncio.shield(self._saving)

    async def save_now(self, replica: Replica, offers: Offers) -> None:
        """The last save before the end; the trainer has stopped."""
        await self.saved()
        await self._write(_Moment.of(replica, offers))

    async def _save(self, moment: "_Moment") -> None:
        # The trainer's snapshot must know of the fate that the chain's head implies.
        if await self._adopted(moment.head.round):
            await self._write(moment)
        else:
            self.trouble = f"the trainer has not adopted round {moment.head.round} in time"
            self._set_back("not saved", self.trouble)

    async def _write(self, moment: "_Moment") -> None:
        try:
            await self._work(self._write_files, moment)
            self.trouble = ""
        except StorageError as error:
            self.trouble = str(error)
            self._set_back("not saved", self.trouble)

    def _write_files(self, moment: "_Moment") -> None:
        copied = self._arena.copy_snapshot()
        inner = dict(copied[0].vectors) if copied else {}
        if copied:
            inner[OUTBOX] = torch.frombuffer(bytearray(copied[1]), dtype=torch.uint8)
        taken = Checkpoint(
            run_id=self._manifest.run_id,
            shapes=self._shapes.hash(),
            round=moment.head.round,
            digest=moment.head.digest,
            chain={"head": moment.head.to_json(), "offer": moment.offer},
            anchor=moment.state.anchor,
            outer=dict(moment.state.slots),
            inner=inner,
            inner_meta=copied[0].meta if copied else {},
        )
        checkpoint.save(self._folder.checkpoints, taken, self._shapes, self._manifest.checkpoint.keep)


@dataclass(frozen=True)
class _Moment:
    """What a save is to hold, taken at once: the replica moves on while it is written."""

    head: Head
    state: OuterState
    offer: dict[str, Any] | None

    @classmethod
    def of(cls, replica: Replica, offers: Offers) -> "_Moment":
        return cls(replica.chain.head, replica.state, offers.to_json())

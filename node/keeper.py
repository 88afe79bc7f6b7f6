"""Keeps on disk what the next start needs, and in the blob store what others may still ask for.

A checkpoint is written in the background after a round. The one after it waits for that, so a kill at any moment
costs at most one round.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import torch

from node import checkpoint
from node.arena import VECTORS, Arena
from node.checkpoint import Checkpoint
from node.folder import RunFolder
from node.model import ShapeTable
from node.offers import Offers
from node.replica import OuterState
from protocol.blob_store import BlobStore
from protocol.blobs import Blob
from protocol.chain import Chain, Head
from protocol.errors import StorageError
from protocol.manifest import Manifest
from protocol.statements import Commit

logger = logging.getLogger(__name__)

KEPT_ROUNDS = 4  # whose blobs a peer that lags may still fetch
KEPT_STATES = 2
OUTBOX = "outbox"


class Keeper:
    def __init__(
        self, folder: RunFolder, manifest: Manifest, shapes: ShapeTable, store: BlobStore, arena: Arena,
        work: Callable[..., Awaitable[Any]], adopted: Callable[[int], Awaitable[bool]],
    ) -> None:  # fmt: skip
        self._folder, self._manifest, self._shapes, self._store = folder, manifest, shapes, store
        self._arena, self._work, self._adopted = arena, work, adopted
        self._rounds: deque[set[bytes]] = deque(maxlen=KEPT_ROUNDS)
        self._states: deque[bytes] = deque(maxlen=KEPT_STATES)
        self._saving: asyncio.Task[None] | None = None

    def prune(self, offers: Offers, state: Blob, commits: Iterable[Commit]) -> None:
        """After a round (or a jump): drop the blobs that nobody should still ask for."""
        self._rounds.extend(_blobs_of(commit) for commit in commits)
        self._states.append(state.digest)
        offered = {part.digest for part in offers.current.parts} if offers.current else set()
        self._store.retain(set().union(*self._rounds, self._states, offered))

    async def keep(self, chain: Chain, offers: Offers, state: OuterState) -> None:
        """Save in the background, where the manifest says so; returns once the save before this one is on disk."""
        if chain.round % self._manifest.checkpoint.every_rounds == 0:
            await self.saved()
            facts = {"head": chain.head.to_json(), "offer": offers.to_json()}
            self._saving = asyncio.create_task(self._save(chain.head, facts, state), name="checkpoint")

    async def saved(self) -> None:
        """The save under way, if there is one, is on disk, or has failed with a line in the log."""
        if self._saving is not None:
            await asyncio.shield(self._saving)

    async def save_now(self, chain: Chain, offers: Offers, state: OuterState) -> None:
        """The last save before the end; the trainer has stopped."""
        await self.saved()
        await self._write(chain.head, {"head": chain.head.to_json(), "offer": offers.to_json()}, state)

    async def _save(self, head: Head, facts: dict[str, Any], state: OuterState) -> None:
        # The trainer's snapshot must know of the fate that the chain's head implies.
        if await self._adopted(head.round):
            await self._write(head, facts, state)
        else:
            logger.warning("round %d is not saved: the trainer has not adopted it in time", head.round)

    async def _write(self, head: Head, facts: dict[str, Any], state: OuterState) -> None:
        try:
            await self._work(self._write_file, head, facts, state)
        except StorageError as error:
            logger.error("%s", error)

    def _write_file(self, head: Head, facts: dict[str, Any], state: OuterState) -> None:
        copied = self._arena.copy_snapshot()
        inner = dict(copied[0].vectors) if copied else {}
        if copied:
            inner[OUTBOX] = torch.frombuffer(bytearray(copied[1]), dtype=torch.uint8)
        taken = Checkpoint(
            run_id=self._manifest.run_id,
            shapes=self._shapes.hash(),
            round=head.round,
            digest=head.digest,
            chain=facts,
            anchor=state.anchor,
            outer=dict(state.slots),
            inner=inner,
            inner_meta=copied[0].meta if copied else {},
        )
        checkpoint.save(self._folder.checkpoints, taken, self._shapes, self._manifest.checkpoint.keep)


def restore_inner(saved: Checkpoint, arena: Arena) -> None:
    """Put the trainer's part of a checkpoint back where a trainer looks for it."""
    if not saved.inner:
        return
    outbox = saved.inner[OUTBOX].numpy().tobytes()
    arena.outbox[: len(outbox)] = outbox
    arena.write_snapshot({name: saved.inner[name] for name in VECTORS}, saved.inner_meta)


def _blobs_of(commit: Commit) -> set[bytes]:
    """What it takes to apply a commit: the reduced parts, or the contributions themselves."""
    needed = commit.parts or tuple(contribution.body.parts[0] for contribution in commit.contributions)
    return {blob.digest for blob in needed}

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

from node.arena import SharedMemory
from node.checkpoints import checkpoint
from node.checkpoints.checkpoint import Checkpoint
from node.daemon.metrics import RecoveredErrorKind
from node.daemon.offers import ContributionTracker
from node.daemon.replica import OuterState, ReplicatedState
from node.daemon.resumption import CONTRIBUTION_VECTOR
from node.daemon.workers import RunInThread
from node.folder import RunDir
from node.model import ShapeTable
from protocol.blobs.blob import Blob
from protocol.blobs.store import BlobStore
from protocol.errors import StorageError
from protocol.manifest import Manifest
from protocol.rounds.chain import ChainHead
from protocol.rounds.statements import Commit

logger = logging.getLogger(__name__)

RETAINED_ROUNDS = 4  # whose blobs a peer that lags may still fetch, where there is room
MAX_RETAINED_STATES = 6  # with those that somebody is still fetching


class Checkpointer:
    """`work` runs a function in a thread that may be busy for long; `adopted(round)` waits for the trainer; `wanted`
    names the blobs that others are fetching, `carried` those that we hold for them, or may need in the next round.
    `room`: bytes that the blobs of past rounds may take; where many peers exchange dense messages that is for fewer
    rounds, and whoever lags by more fetches a state."""

    def __init__(
        self, run_dir: RunDir, manifest: Manifest, shapes: ShapeTable, store: BlobStore, shared_memory: SharedMemory,
        run_in_thread: RunInThread, wait_until_applied: Callable[[int], Awaitable[bool]], blobs_being_fetched: Callable[[], Collection[bytes]],
        blobs_held_for_others: Callable[[], Collection[bytes]], record_recovered: Callable[[RecoveredErrorKind, str], None], max_blob_bytes: int,
    ) -> None:  # fmt: skip
        self._run_dir = run_dir
        self._manifest = manifest
        self._shapes = shapes
        self._store = store
        self._shared_memory = shared_memory
        self._run_in_thread = run_in_thread
        self._wait_until_applied = wait_until_applied
        self._blobs_being_fetched = blobs_being_fetched
        self._blobs_held_for_others = blobs_held_for_others
        self._record_recovered = record_recovered
        self._max_blob_bytes = max_blob_bytes
        self._recent_blob_sizes: deque[dict[bytes, int]] = deque(maxlen=RETAINED_ROUNDS)  # the sizes of their blobs
        self._retained_states: list[bytes] = []  # oldest first
        self._saving: asyncio.Task[None] | None = None
        self.last_error = ""  # why the newest checkpoint is not on disk; empty: it is

    async def retain_state(self, state: Blob) -> None:
        """There is a new state, in memory anyway. One before it goes to the disk if a slow peer is in the middle of it
        (which would never arrive otherwise), and else with the memory that it lies in."""
        wanted = self._blobs_being_fetched()
        older = [digest for digest in self._retained_states if digest in wanted and digest != state.digest][: MAX_RETAINED_STATES - 1]
        for digest in older:
            await self._write_state_to_disk(digest)
        self._retained_states = [*older, state.digest]

    def prune_blobs(self, contributions: ContributionTracker, commits: Iterable[Commit]) -> None:
        """After a round (or a jump): drop the blobs that nobody should still ask for."""
        self._recent_blob_sizes.extend({blob.digest: blob.size for blob in commit.blobs} for commit in commits)
        while len(self._recent_blob_sizes) > 1 and sum(sum(sizes.values()) for sizes in self._recent_blob_sizes) > self._max_blob_bytes:
            self._recent_blob_sizes.popleft()
        offered = (part.digest for part in contributions.retained_parts)
        self._store.retain(set().union(*self._recent_blob_sizes, self._retained_states, offered, self._blobs_held_for_others()))

    async def _write_state_to_disk(self, digest: bytes) -> None:
        try:
            await self._run_in_thread(self._store.move_to_disk, digest)
        except StorageError as error:
            self._record_recovered("state gone", f"who is fetching an earlier state has to begin anew: {error}")
            self._store.discard(digest)

    async def save_in_background(self, replicated: ReplicatedState, contributions: ContributionTracker) -> None:
        """Save in the background, where the manifest says so; returns once the save before this one is on disk."""
        if self._is_save_due(replicated):
            await self.wait_until_saved()
            self._saving = asyncio.create_task(self._save_once_applied(_PendingSave.of(replicated, contributions)), name="checkpoint")

    async def wait_until_announceable(self, replicated: ReplicatedState) -> None:
        """For people and peers to hear of its round: a kill may take back one that was told, and no two."""
        if self._is_save_due(replicated):
            await self.wait_until_saved()

    def _is_save_due(self, replicated: ReplicatedState) -> bool:
        return replicated.chain.round % self._manifest.checkpoint.every_rounds == 0

    async def wait_until_saved(self) -> None:
        """The save under way, if there is one, is on disk, or has failed with a line in the log."""
        if self._saving is not None:
            await asyncio.shield(self._saving)

    async def save_now(self, replicated: ReplicatedState, contributions: ContributionTracker) -> None:
        """The last save before the end; the trainer has stopped."""
        await self.wait_until_saved()
        await self._write(_PendingSave.of(replicated, contributions))

    async def _save_once_applied(self, pending: "_PendingSave") -> None:
        # The trainer's snapshot must know of the fate that the chain's head implies.
        if await self._wait_until_applied(pending.head.round):
            await self._write(pending)
        else:
            self.last_error = f"the trainer has not adopted round {pending.head.round} in time"
            self._record_recovered("not saved", self.last_error)

    async def _write(self, pending: "_PendingSave") -> None:
        try:
            await self._run_in_thread(self._write_files, pending)
            self.last_error = ""
        except StorageError as error:
            self.last_error = str(error)
            self._record_recovered("not saved", self.last_error)

    def _write_files(self, pending: "_PendingSave") -> None:
        copied = self._shared_memory.copy_snapshot()
        inner = dict(copied[0].vectors) if copied else {}
        if copied:
            inner[CONTRIBUTION_VECTOR] = torch.frombuffer(bytearray(copied[1]), dtype=torch.uint8)
        taken = Checkpoint(
            run_id=self._manifest.run_id,
            shapes=self._shapes.hash(),
            round=pending.head.round,
            digest=pending.head.digest,
            chain={"head": pending.head.to_json(), "offer": pending.contributions},
            anchor=pending.state.anchor,
            outer=dict(pending.state.slots),
            inner=inner,
            inner_meta=copied[0].meta if copied else {},
        )
        checkpoint.save(self._run_dir.checkpoints, taken, self._shapes, self._manifest.checkpoint.keep)


@dataclass(frozen=True)
class _PendingSave:
    """What a save is to hold, taken at once: the replica moves on while it is written."""

    head: ChainHead
    state: OuterState
    contributions: dict[str, Any] | None

    @classmethod
    def of(cls, replicated: ReplicatedState, contributions: ContributionTracker) -> "_PendingSave":
        return cls(replicated.chain.head, replicated.state, contributions.to_json())

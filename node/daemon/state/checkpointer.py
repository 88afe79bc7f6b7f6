"""Write checkpoints in the background, and retain the blobs that peers may request.

A checkpoint is written after every `checkpoint.every_rounds` rounds, those of large models less often. The next one
waits for it, so that after a kill at any moment the disk has the last or the last but one that was due.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from node.daemon.checkpoints import checkpoint
from node.daemon.checkpoints.checkpoint import Checkpoint, SavedChain
from node.daemon.checkpoints.checkpoint_folders import keep_newest, release_kept
from node.daemon.state.contributions import CONTRIBUTION_VECTOR, TRACKER_KEY
from node.daemon.state.outer_state import OuterState, ReplicatedState
from node.daemon.state.replica_state import ReplicaState
from node.disk_budget import checkpoints_within, folder_bytes
from node.loop.contributions import ContributionTracker
from node.loop.peers.catch_up import RETAINED_ROUNDS
from node.monitoring.status import ErrorRecorder
from protocol.blobs.blob import Blob
from protocol.consensus.chain import ChainHead, ChainLog
from protocol.consensus.messages.contributions import Commit
from protocol.errors import StorageError

# Vectors stay as they are while they are written, so a trainer may have to wait for it; and a disk wears out.
BYTES_PER_SECOND = 5e7  # on average: 31 million parameters every 19 s, a billion every 11 minutes
FREE_BYTES = 1 << 26  # small states are saved as often as rounds come
KEPT_SECONDS = 30.0  # of the blobs of a round, for a peer that is still replaying it while faster ones go on
CONFIRMED_ROUNDS = 8  # of a new chain, before the checkpoint of the old one may go
MAX_RETAINED_STATES = 6  # including those that peers are downloading
MAX_RETAINED_ROUNDS = 256  # where rounds are so short that many pass within KEPT_SECONDS
MAX_OLD_STATES = 2  # of them the oldest, whose downloads are the slowest; the others are the newest


@dataclass(frozen=True)
class RoundBlobs:
    """The sizes of the blobs of a commit by digest, and since when it is applied here."""

    since: float
    sizes: Mapping[bytes, int]

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())


class Checkpointer:
    """Writes the checkpoints of one replica in the background, and retains the blobs that peers may request.

    Args:
        state: the replica's.
        wait_until_applied: returns whether the trainer has applied the anchor of a round in time.
        requested_digests: returns the blobs that other peers are downloading from us.
        held_digests: returns the blobs that are relayed for others, or may be needed in the next round.
        errors: counts and logs what fails.
        clock: the time in seconds.
    """

    def __init__(
        self,
        state: ReplicaState,
        wait_until_applied: Callable[[int], Awaitable[bool]],
        requested_digests: Callable[[], Collection[bytes]],
        held_digests: Callable[[], Collection[bytes]],
        errors: ErrorRecorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._folder = state.run_dir.checkpoints
        self._store = state.store
        # With many peers and dense contributions fewer rounds are retained; a peer further behind downloads a state.
        self._max_blob_bytes = state.max_store_bytes // 2
        self.schedule = state.steering.manifest_at(state.replicated.chain.round).checkpoint
        self._wait_until_applied = wait_until_applied
        self._requested_digests = requested_digests
        self._held_digests = held_digests
        self._errors = errors
        self._clock = clock
        self._recent_blobs = deque[RoundBlobs](maxlen=MAX_RETAINED_ROUNDS)  # one entry a round
        self._retained_states: list[bytes] = []  # oldest first
        self._saving: asyncio.Task[None] | None = None
        self._saved_round: int | None = None  # of the newest save
        self._next_save_at = -math.inf
        self._unconfirmed = CONFIRMED_ROUNDS  # rounds until a checkpoint that an earlier process kept may go
        self.last_error = ""  # why the newest checkpoint is not on disk; empty if it is

    async def retain_state(self, state: Blob) -> None:
        """Retain the new state, which is in memory, and older ones that peers are downloading.

        An older state is moved to disk if a slow peer is downloading it, and dropped with its memory otherwise.
        """
        requested = self._requested_digests()
        older = [digest for digest in self._retained_states if digest in requested and digest != state.digest]
        if len(older) >= MAX_RETAINED_STATES:
            older = older[:MAX_OLD_STATES] + older[MAX_OLD_STATES + 1 - MAX_RETAINED_STATES :]
        for digest in older:
            await self._write_state_to_disk(digest)
        self._retained_states = [*older, state.digest]

    async def free_anchor(self, round_number: int, kept: Blob) -> None:
        """Free the shared memory in which the anchor of a round is about to be written; `kept` is in the other part.

        The state of two rounds before may be there. A checkpoint that is being written reads it, and a slow peer may be
        downloading it.
        """
        if self._saved_round is not None and (self._saved_round - round_number) % 2 == 0:
            await self.wait_until_saved()
        requested = self._requested_digests()
        for digest in [digest for digest in self._retained_states if digest != kept.digest]:
            if digest in requested:
                await self._write_state_to_disk(digest)
            else:
                self._store.discard(digest)
                self._retained_states.remove(digest)

    def is_anchor_free(self, round_number: int, kept: Blob) -> bool:
        """Return whether `free_anchor` has nothing to wait for."""
        is_saved = self._saving is None or self._saving.done() or (self._saved_round or 0) % 2 != round_number % 2
        return is_saved and not any(self._store.is_lent(each) for each in self._retained_states if each != kept.digest)

    def prune_blobs(self, contributions: ContributionTracker, commits: Iterable[Commit]) -> None:
        """Drop the blobs that no peer should request any more, after a round or a state download."""
        now, known = self._clock(), self._recent_blobs
        newest = [*commits][-RETAINED_ROUNDS:]  # a jump skips the earlier ones
        known.extend(RoundBlobs(now, {blob.digest: blob.size for blob in commit.blobs}) for commit in newest)
        while len(known) > 1 and (
            sum(entry.bytes for entry in known) > self._max_blob_bytes
            or (len(known) > RETAINED_ROUNDS and known[0].since <= now - KEPT_SECONDS)
        ):
            known.popleft()
        parts, rounds = (part.digest for part in contributions.retained_parts), (entry.sizes for entry in known)
        self._store.retain(set().union(*rounds, self._retained_states, parts, self._held_digests()))

    async def _write_state_to_disk(self, digest: bytes) -> None:
        try:
            await asyncio.to_thread(self._store.move_to_disk, digest)
        except StorageError as error:
            self._errors.record_recovered(
                "state gone", f"peers that download an earlier state must start over: {error}"
            )
            self._store.discard(digest)

    async def keep_before_jump(self) -> None:
        """Keep the newest checkpoint until the chain that replaces ours has been confirmed for a while."""
        await self.wait_until_saved()
        await asyncio.to_thread(keep_newest, self._folder)
        self._unconfirmed = CONFIRMED_ROUNDS

    def confirm_round(self) -> None:
        """Count a round that we took part in; after enough of them the checkpoint before the jump may go."""
        self._unconfirmed -= 1
        if self._unconfirmed == 0:
            release_kept(self._folder)

    async def save_in_background(self, replicated: ReplicatedState, contributions: ContributionTracker) -> None:
        """Start a save if one is due; wait until the previous one is on disk."""
        if self._is_save_due(replicated):
            await self.wait_until_saved()
            layout = self._state.shared_memory.layout
            costly = max(0, layout.total_bytes + layout.file_bytes - FREE_BYTES)
            self._next_save_at = self._clock() + costly / BYTES_PER_SECOND
            self._saved_round = replicated.chain.round
            self._saving = asyncio.create_task(
                self._save_once_applied(_PendingSave.of(replicated, contributions)), name="checkpoint"
            )

    async def wait_until_announceable(self, replicated: ReplicatedState) -> None:
        """Wait until the round may be announced: a kill may revert one announced round, never two."""
        if self._is_save_due(replicated):
            await self.wait_until_saved()

    def _is_save_due(self, replicated: ReplicatedState) -> bool:
        return replicated.chain.round % self.schedule.every_rounds == 0 and self._clock() >= self._next_save_at

    async def wait_until_saved(self) -> None:
        """Wait until the running save, if any, is on disk or has failed with a line in the log."""
        if self._saving is not None:
            await asyncio.shield(self._saving)

    async def save_now(self, replicated: ReplicatedState, contributions: ContributionTracker) -> None:
        """Write the last checkpoint, after the trainer has stopped."""
        await self.wait_until_saved()
        await self._write(_PendingSave.of(replicated, contributions))

    async def _save_once_applied(self, pending: "_PendingSave") -> None:
        # The trainer's snapshot must include the outcome that the chain's head implies.
        if await self._wait_until_applied(pending.head.round):
            await self._write(pending)
        else:
            self.last_error = f"the trainer has not applied round {pending.head.round} in time"
            self._errors.record_recovered("not saved", self.last_error)

    async def _write(self, pending: "_PendingSave") -> None:
        try:
            await asyncio.to_thread(self._write_files, pending)
            self.last_error = ""
        except StorageError as error:
            self.last_error = str(error)
            self._errors.record_recovered("not saved", self.last_error)

    def _write_files(self, pending: "_PendingSave") -> None:
        inner = self._write_inner()
        snapshot = Checkpoint(
            run_id=self._state.run_id,
            shapes=self._state.shapes.hash(),
            round=pending.head.round,
            digest=pending.head.digest,
            chain=SavedChain.of(pending.head, pending.log, **{TRACKER_KEY: pending.contributions}),
            anchor=pending.state.anchor,
            outer=pending.state.slots,
            inner={},
            inner_meta=inner.meta if inner else {},
            written=inner,
        )
        checkpoint.save(self._folder, snapshot, self._state.shapes, self._kept_count())

    def _write_inner(self) -> checkpoint.WrittenInner | None:
        """Stream the trainer's vectors and the outbox to a file, until nothing has changed meanwhile."""
        memory = self._state.shared_memory
        inner: checkpoint.WrittenInner | None = None
        for snapshot in memory.whole_snapshots():
            outbox = torch.frombuffer(memory.contribution_buffer, dtype=torch.uint8)
            vectors = {**snapshot.vectors, CONTRIBUTION_VECTOR: outbox}
            inner = checkpoint.write_inner(self._folder, vectors, snapshot.meta, self._state.shapes)
        return inner

    def _kept_count(self) -> int:
        """Return how many checkpoints to keep: as many as the run asks for, or fewer that fit into the budget."""
        folder, keep = self._folder, self.schedule.keep
        saved = len(list(folder.glob("*.round-*"))) if folder.exists() else 0
        if self._state.disk_budget is None or not saved:
            return keep
        stored = folder_bytes(folder)
        return checkpoints_within(self._state.disk_budget, folder_bytes(folder.parent), stored, stored // saved, keep)


@dataclass(frozen=True)
class _PendingSave:
    """The content of a save, captured at once because the replica moves on during the write."""

    head: ChainHead
    log: ChainLog
    state: OuterState
    contributions: dict[str, Any] | None

    @classmethod
    def of(cls, replicated: ReplicatedState, contributions: ContributionTracker) -> "_PendingSave":
        chain = replicated.chain
        return cls(chain.head, chain.log, replicated.state, contributions.to_json())

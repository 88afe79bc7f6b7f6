"""Write checkpoints in the background, retain the blobs that peers may request, and restore both at a start.

After a restart, the trainer's last contribution may be newer than the checkpoint, and a round may include it. It then
carries the unsent work of the checkpoint's snapshot, which must not be sent twice. So the node changes the snapshot as
if the contribution had just been sent, in every value that it names; values that it does not name (a sparse one names
few) remain unsent. The steps since the checkpoint that it does not carry are lost, and so is the codec's rounding
error. If several contributions were made since, the earlier ones are unknown, and all unsent work is dropped.

A checkpoint is written after every `checkpoint.every_rounds` rounds. The next one waits for it, so that after a kill at
any moment the disk has the last or the last but one that was due.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from node.daemon.checkpoints import checkpoint
from node.daemon.checkpoints.chain_file import SavedChain
from node.daemon.checkpoints.checkpoint import Checkpoint
from node.daemon.checkpoints.checkpoint_folders import keep_newest, release_kept
from node.daemon.checkpoints.named_vectors import SavedInner
from node.daemon.state.outer_state import OuterState, ReplicatedState
from node.disk_budget import checkpoints_within, folder_bytes
from node.loop.contributions import ContributionFile, ContributionTracker, LastSent, StoredContribution, store_parts
from node.loop.peers.catch_up import RETAINED_ROUNDS
from node.model import ShapeTable
from node.monitoring.status import ErrorRecorder
from node.trainer.counters import Counters, Outstanding, SettledOutcome, StepTotals
from node.trainer.ipc.shared_memory import REFERENCE, RESIDUAL, SharedMemory, locally_trained_names
from optim.exchange import nonzero_mask
from optim.inner.adamw import AdamW
from optim.inner.eight_bit import EightBitAdamW
from optim.round_plan import RoundPlanner
from protocol.blobs.blob import Blob
from protocol.blobs.store import BlobStore
from protocol.consensus.history.certified import ChainLog
from protocol.consensus.history.chain import ChainHead
from protocol.consensus.messages.contributions import Commit
from protocol.errors import CheckpointError, MissingFileError, StorageError
from protocol.manifest.run import RunId
from protocol.manifest.sections import CheckpointSection

logger = logging.getLogger(__name__)

OFFER_KEY = "offer"  # in the chain's table of a checkpoint: the contributions
OTHER_METHOD = "the checkpoint has the state of another method; choose another folder or remove it"
MOMENTS = frozenset((*AdamW.vectors, *EightBitAdamW.vectors))  # of both memory modes
CONTRIBUTION_VECTOR = "outbox"  # the name of the outbox bytes among a checkpoint's vectors


def restore_trainer_snapshot(saved: Checkpoint, shared_memory: SharedMemory) -> None:
    """Copy the trainer's part of a checkpoint to the shared memory."""
    if not saved.inner:
        return
    assert isinstance(saved.inner, SavedInner), "it was loaded"
    expected = {CONTRIBUTION_VECTOR, *dict(shared_memory.layout.vectors)}
    if ({*saved.inner} ^ expected) - MOMENTS:
        raise CheckpointError(OTHER_METHOD)
    if expected - {*saved.inner}:
        logger.info("the checkpoint has moments of another memory mode; they start again from zero")
    outbox = saved.inner[CONTRIBUTION_VECTOR].numpy().data
    shared_memory.contribution_buffer[: len(outbox)] = outbox
    shared_memory.invalidate()
    try:
        for name, vector in shared_memory.vectors.items():
            if name in saved.inner:
                saved.inner.copy_to(name, vector)
            else:
                vector.zero_()
    except ValueError as error:  # the sizes differ
        raise CheckpointError(OTHER_METHOD) from error
    shared_memory.publish(saved.inner_meta)


def restore_contributions(
    saved: Checkpoint | None,
    planner: RoundPlanner,
    shared_memory: SharedMemory,
    store: BlobStore,
    contribution_file: ContributionFile,
    errors: ErrorRecorder,
) -> ContributionTracker:
    """Restore the pending contribution, so that no work is sent twice. Raises StorageError.

    Call `restore_trainer_snapshot` before. A round may have included the contribution while this node was down.
    """
    tracker = (
        ContributionTracker.from_json(planner, saved.chain.table[OFFER_KEY]) if saved else ContributionTracker(planner)
    )
    if saved is None or not saved.inner:
        contribution_file.delete()
        return tracker
    counters = Counters.model_validate(saved.inner_meta)
    outstanding = None if counters.outstanding is None else counters.outstanding.to_header()
    contribution = (
        None if outstanding is None else StoredContribution(outstanding, store_parts(store, shared_memory, outstanding))
    )
    last = contribution_file.load()
    later = tracker.restore(contribution, counters.messages, last, saved.round)
    if last is not None and later != "none":
        logger.info("a contribution was sent after the checkpoint; its work is not sent again")
        payloads = _read_payloads(last.contribution, store)
        if not payloads:
            errors.record_recovered(
                "contribution missing", "the last contribution is missing on disk and is not submitted again"
            )
            tracker.pending = None
        _account_for_sent(last, payloads, later == "one", tracker, planner, shared_memory)
    elif tracker.pending is not None:
        contribution_file.save(LastSent(tracker.pending, tuple(tracker.settled)))
    return tracker


def _account_for_sent(
    last_sent: LastSent,
    payloads: Sequence[bytes],
    is_first_since_snapshot: bool,
    contributions: ContributionTracker,
    planner: RoundPlanner,
    shared_memory: SharedMemory,
) -> None:
    """Change the snapshot as if the last sent contribution had just been sent."""
    sent, snapshot = last_sent.contribution, shared_memory.read_snapshot()
    assert snapshot is not None
    subtract_sent_progress(planner, snapshot.vectors, sent.header.round, payloads if is_first_since_snapshot else [])
    outstanding = Outstanding.from_header(sent.header) if contributions.pending else None
    if outstanding is not None:
        outbox = b"".join(payloads)
        shared_memory.contribution_buffer[: len(outbox)] = outbox
    updates = {
        "messages": sent.header.serial,
        "outstanding": outstanding,
        "settled": tuple(
            SettledOutcome.from_header(entry.contribution.header, entry.outcome) for entry in last_sent.settled
        ),
        "since_message": StepTotals(),
        "unreported": StepTotals(),
    }
    counters = Counters.model_validate(snapshot.meta).model_copy(update=updates)
    shared_memory.publish(counters.model_dump(mode="json"))


def _read_payloads(contribution: StoredContribution, store: BlobStore) -> list[bytes]:
    """Return the parts, or nothing if one of them is missing."""
    try:
        return [bytes(store.read(blob.digest)) for blob in contribution.parts]
    except MissingFileError:
        return []


def subtract_sent_progress(
    planner: RoundPlanner, vectors: Mapping[str, Tensor], round_number: int, payloads: Sequence[bytes]
) -> None:
    """Subtract the progress in a contribution from a trainer's vectors, in place; all progress without payloads."""
    signal, residual, reference = planner.method.signal, vectors[RESIDUAL], vectors[REFERENCE]
    live = torch.cat([vectors[name] for name in locally_trained_names(planner.method)])
    if payloads and signal.is_delta and not signal.consumed_names and residual.numel() == reference.numel():
        sent = nonzero_mask(planner.plan(round_number), payloads, residual.numel())
        residual[sent], reference[sent] = 0.0, live[sent]
        return
    residual.zero_()
    reference.copy_(live)
    for name in signal.consumed_names:
        vectors[name].zero_()


CONFIRMED_ROUNDS = 8  # of a new chain, before the checkpoint of the old one may go
MAX_RETAINED_STATES = 6  # including those that peers are downloading
MAX_OLD_STATES = 2  # of them the oldest, whose downloads are the slowest; the others are the newest


@dataclass(frozen=True, kw_only=True)
class CheckpointerOptions:
    """The content and interval of a run's checkpoints.

    `max_blob_bytes` limits the blobs of past rounds. With many peers and dense contributions fewer rounds are retained,
    and a peer further behind downloads a state.
    """

    directory: Path
    run_id: RunId
    shapes: ShapeTable
    schedule: CheckpointSection
    max_blob_bytes: int
    disk_budget: int | None = None  # bytes of the node's folder; None means no limit


class AnchorReceiver(Protocol):
    async def wait_until_applied(self, round_number: int) -> bool:
        """Return whether the trainer has applied that round's anchor in time."""


class BlobDemand(Protocol):
    """The blobs that must stay for other peers or for the next round."""

    def requested_digests(self) -> Collection[bytes]:
        """Return the blobs that other peers are downloading from us."""

    def held_digests(self) -> Collection[bytes]:
        """Return the blobs that are relayed for others, or may be needed in the next round."""


class Checkpointer:
    """Writes the checkpoints of one replica in the background, and retains the blobs that peers may request."""

    def __init__(
        self,
        options: CheckpointerOptions,
        store: BlobStore,
        shared_memory: SharedMemory,
        trainer: AnchorReceiver,
        demand: BlobDemand,
        errors: ErrorRecorder,
    ) -> None:
        self._options = options
        self.schedule = options.schedule  # as the organiser's revisions have it
        self._store = store
        self._shared_memory = shared_memory
        self._trainer = trainer
        self._demand = demand
        self._errors = errors
        self._recent_blob_sizes: deque[dict[bytes, int]] = deque(
            maxlen=RETAINED_ROUNDS
        )  # blob sizes, one entry a round
        self._retained_states: list[bytes] = []  # oldest first
        self._saving: asyncio.Task[None] | None = None
        self._saved_round: int | None = None  # of the newest save
        self._unconfirmed = CONFIRMED_ROUNDS  # rounds until a checkpoint that an earlier process kept may go
        self.last_error = ""  # why the newest checkpoint is not on disk; empty if it is

    async def retain_state(self, state: Blob) -> None:
        """Retain the new state, which is in memory, and older ones that peers are downloading.

        An older state is moved to disk if a slow peer is downloading it, and dropped with its memory otherwise.
        """
        requested = self._demand.requested_digests()
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
        requested = self._demand.requested_digests()
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
        self._recent_blob_sizes.extend({blob.digest: blob.size for blob in commit.blobs} for commit in commits)
        while (
            len(self._recent_blob_sizes) > 1
            and sum(sum(sizes.values()) for sizes in self._recent_blob_sizes) > self._options.max_blob_bytes
        ):
            self._recent_blob_sizes.popleft()
        parts = (part.digest for part in contributions.retained_parts)
        self._store.retain(
            set().union(*self._recent_blob_sizes, self._retained_states, parts, self._demand.held_digests())
        )

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
        await asyncio.to_thread(keep_newest, self._options.directory)
        self._unconfirmed = CONFIRMED_ROUNDS

    def confirm_round(self) -> None:
        """Count a round that we took part in; after enough of them the checkpoint before the jump may go."""
        self._unconfirmed -= 1
        if self._unconfirmed == 0:
            release_kept(self._options.directory)

    async def save_in_background(self, replicated: ReplicatedState, contributions: ContributionTracker) -> None:
        """Start a save if one is due; wait until the previous one is on disk."""
        if self._is_save_due(replicated):
            await self.wait_until_saved()
            self._saved_round = replicated.chain.round
            self._saving = asyncio.create_task(
                self._save_once_applied(_PendingSave.of(replicated, contributions)), name="checkpoint"
            )

    async def wait_until_announceable(self, replicated: ReplicatedState) -> None:
        """Wait until the round may be announced: a kill may revert one announced round, never two."""
        if self._is_save_due(replicated):
            await self.wait_until_saved()

    def _is_save_due(self, replicated: ReplicatedState) -> bool:
        return replicated.chain.round % self.schedule.every_rounds == 0

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
        if await self._trainer.wait_until_applied(pending.head.round):
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
            run_id=self._options.run_id,
            shapes=self._options.shapes.hash(),
            round=pending.head.round,
            digest=pending.head.digest,
            chain=SavedChain.of(pending.head, pending.log, **{OFFER_KEY: pending.contributions}),
            anchor=pending.state.anchor,
            outer=pending.state.slots,
            inner={},
            inner_meta=inner.meta if inner else {},
            written=inner,
        )
        checkpoint.save(self._options.directory, snapshot, self._options.shapes, self._kept_count())

    def _write_inner(self) -> checkpoint.WrittenInner | None:
        """Stream the trainer's vectors and the outbox to a file, until nothing has changed meanwhile."""
        options, memory = self._options, self._shared_memory
        inner: checkpoint.WrittenInner | None = None
        for snapshot in memory.whole_snapshots():
            outbox = torch.frombuffer(memory.contribution_buffer, dtype=torch.uint8)
            vectors = {**snapshot.vectors, CONTRIBUTION_VECTOR: outbox}
            inner = checkpoint.write_inner(options.directory, vectors, snapshot.meta, options.shapes)
        return inner

    def _kept_count(self) -> int:
        """Return how many checkpoints to keep: as many as the run asks for, or fewer that fit into the budget."""
        folder, keep = self._options.directory, self.schedule.keep
        saved = len(list(folder.glob("*.round-*"))) if folder.exists() else 0
        if self._options.disk_budget is None or not saved:
            return keep
        stored = folder_bytes(folder)
        return checkpoints_within(self._options.disk_budget, folder_bytes(folder.parent), stored, stored // saved, keep)


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

"""How a node goes on from its disk: its trainer's part of a checkpoint, and the message that was on its way.

A message may have been made after the checkpoint, and a round may take it, or has. Then what the checkpoint's trainer
still had to say is in that message, and would be said twice. So the snapshot is made to look as if the message had just
been sent, wherever it says anything: what it does not carry (a sparse one names few values) is still to be said. What
is lost are the steps since the checkpoint that it does not carry, and what the code rounded away. Where several
messages were made since, the earlier ones are not known any more, and all that the snapshot had to say is dropped.

Keeps on disk what the next start needs, and in the blob store what others may still ask for.

A checkpoint is written in the background, after every round or every few (`checkpoint.every_rounds`). The one after it
waits for that, so that a kill at any moment finds on disk the last or the last but one that was due.
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

from node.checkpoints import checkpoint
from node.checkpoints.checkpoint import Checkpoint
from node.daemon.outer_state import OuterState, ReplicatedState
from node.ipc.shared_memory import REFERENCE, RESIDUAL, SharedMemory, locally_trained_names
from node.loop.catch_up import RETAINED_ROUNDS
from node.loop.contributions import ContributionFile, ContributionTracker, LastSent, StoredContribution, store_parts
from node.model import ShapeTable
from node.monitoring.status import ErrorRecorder
from node.trainer.state import Counters, Outstanding, SettledOutcome, StepTotals
from optim.exchange import nonzero_mask
from optim.round_plan import RoundPlanner
from protocol.blobs.blob import Blob
from protocol.blobs.store import BlobStore
from protocol.consensus.chain import ChainHead
from protocol.consensus.messages import Commit
from protocol.errors import CheckpointError, MissingFileError, StorageError
from protocol.manifest import RunId

logger = logging.getLogger(__name__)

CONTRIBUTION_VECTOR = "outbox"  # the name of its bytes among a checkpoint's vectors


def restore_trainer_snapshot(saved: Checkpoint, shared_memory: SharedMemory) -> None:
    """Put the trainer's part of a checkpoint back where a trainer looks for it."""
    if not saved.inner:
        return
    outbox = saved.inner[CONTRIBUTION_VECTOR].numpy().tobytes()
    shared_memory.contribution_buffer[: len(outbox)] = outbox
    vectors = {name: vector for name, vector in saved.inner.items() if name != CONTRIBUTION_VECTOR}
    if {name: vector.numel() for name, vector in vectors.items()} != dict(shared_memory.layout.vectors):
        raise CheckpointError("the checkpoint holds the state of another method; choose another folder or remove it")
    shared_memory.write_snapshot(vectors, saved.inner_meta)


def restore_contributions(
    saved: Checkpoint | None,
    program: RoundPlanner,
    shared_memory: SharedMemory,
    store: BlobStore,
    contribution_file: ContributionFile,
    errors: ErrorRecorder,
) -> ContributionTracker:
    """The message that is on its way: a round may have taken it while we were away, which must not happen twice.

    After `restore_inner`. Raises StorageError.
    """
    offers = ContributionTracker.from_json(program, saved.chain["offer"]) if saved else ContributionTracker(program)
    if saved is None or not saved.inner:
        contribution_file.delete()
        return offers
    counters = Counters.model_validate(saved.inner_meta)
    outstanding = None if counters.outstanding is None else counters.outstanding.to_header()
    offer = (
        None if outstanding is None else StoredContribution(outstanding, store_parts(store, shared_memory, outstanding))
    )
    last = contribution_file.load()
    later = offers.restore(offer, counters.messages, last, saved.round)
    if last is not None and later != "none":
        logger.info("a message was sent after the checkpoint; what it carries is not sent again")
        payloads = _read_payloads(last.contribution, store)
        if not payloads:
            errors.record_recovered(
                "contribution missing", "the last message is not on the disk any more: it is not offered again"
            )
            offers.pending = None
        _account_for_sent(last, payloads, later == "one", offers, program, shared_memory)
    elif offers.pending is not None:
        contribution_file.save(LastSent(offers.pending, tuple(offers.settled)))
    return offers


def _account_for_sent(
    last_sent: LastSent,
    payloads: Sequence[bytes],
    is_first_since_snapshot: bool,
    contributions: ContributionTracker,
    program: RoundPlanner,
    shared_memory: SharedMemory,
) -> None:
    """`is_next`: it was the first message after the snapshot."""
    sent, snapshot = last_sent.contribution, shared_memory.read_snapshot()
    assert snapshot is not None
    changed = (RESIDUAL, REFERENCE, *program.method.signal.consumed_names)
    vectors = {**snapshot.vectors, **{name: snapshot.vectors[name].clone() for name in changed}}
    subtract_sent_progress(program, vectors, sent.header.round, payloads if is_first_since_snapshot else [])
    outstanding = Outstanding.from_header(sent.header) if contributions.pending else None
    if outstanding is not None:
        message = b"".join(payloads)
        shared_memory.contribution_buffer[: len(message)] = message
    said = {
        "messages": sent.header.serial,
        "outstanding": outstanding,
        "settled": tuple(
            SettledOutcome.from_header(entry.contribution.header, entry.outcome) for entry in last_sent.settled
        ),
        "since_message": StepTotals(),
        "unreported": StepTotals(),
    }
    counters = Counters.model_validate(snapshot.meta).model_copy(update=said)
    shared_memory.write_snapshot(vectors, counters.model_dump(mode="json"))


def _read_payloads(contribution: StoredContribution, store: BlobStore) -> list[bytes]:
    """None at all where a part is gone."""
    try:
        return [bytes(store.read(blob.digest)) for blob in contribution.parts]
    except MissingFileError:
        return []


def subtract_sent_progress(
    program: RoundPlanner, vectors: Mapping[str, Tensor], round_number: int, payloads: Sequence[bytes]
) -> None:
    """Take out of a trainer's vectors, in place, what the message of that round carries of its progress; of no
    payloads, all progress."""
    signal, residual, reference = program.method.signal, vectors[RESIDUAL], vectors[REFERENCE]
    live = torch.cat([vectors[name] for name in locally_trained_names(program.method)])
    if payloads and signal.is_delta and not signal.consumed_names and residual.numel() == reference.numel():
        said = nonzero_mask(program.plan(round_number), payloads, residual.numel())
        residual[said], reference[said] = 0.0, live[said]
        return
    residual.zero_()
    reference.copy_(live)
    for name in signal.consumed_names:
        vectors[name].zero_()


MAX_RETAINED_STATES = 6  # with those that somebody is still fetching


@dataclass(frozen=True, kw_only=True)
class CheckpointerOptions:
    """What a run's checkpoints hold, and how often they are written.

    `max_blob_bytes` bounds the blobs of past rounds: where many peers exchange dense contributions, fewer rounds are
    kept, and a peer that lags by more downloads a state.
    """

    directory: Path
    run_id: RunId
    shapes: ShapeTable
    every_rounds: int
    keep: int
    max_blob_bytes: int


class AnchorReceiver(Protocol):
    async def wait_until_applied(self, round_number: int) -> bool:
        """Return whether the trainer has applied that round's anchor in time."""


class BlobDemand(Protocol):
    """The blobs that must stay although our own rounds do not need them."""

    def requested_digests(self) -> Collection[bytes]:
        """Return the blobs that other peers are downloading from us."""

    def held_digests(self) -> Collection[bytes]:
        """Return the blobs that are relayed for others, or may be needed in the next round."""


class Checkpointer:
    """Writes checkpoints in the background, and retains the blobs that others may still ask for."""

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
        self._store = store
        self._shared_memory = shared_memory
        self._trainer = trainer
        self._demand = demand
        self._errors = errors
        self._recent_blob_sizes: deque[dict[bytes, int]] = deque(maxlen=RETAINED_ROUNDS)  # the sizes of their blobs
        self._retained_states: list[bytes] = []  # oldest first
        self._saving: asyncio.Task[None] | None = None
        self.last_error = ""  # why the newest checkpoint is not on disk; empty: it is

    async def retain_state(self, state: Blob) -> None:
        """There is a new state, in memory anyway. One before it goes to the disk if a slow peer is in the middle of it
        (which would never arrive otherwise), and else with the memory that it lies in."""
        wanted = self._demand.requested_digests()
        older = [digest for digest in self._retained_states if digest in wanted and digest != state.digest][
            : MAX_RETAINED_STATES - 1
        ]
        for digest in older:
            await self._write_state_to_disk(digest)
        self._retained_states = [*older, state.digest]

    def prune_blobs(self, contributions: ContributionTracker, commits: Iterable[Commit]) -> None:
        """After a round (or a jump): drop the blobs that nobody should still ask for."""
        self._recent_blob_sizes.extend({blob.digest: blob.size for blob in commit.blobs} for commit in commits)
        while (
            len(self._recent_blob_sizes) > 1
            and sum(sum(sizes.values()) for sizes in self._recent_blob_sizes) > self._options.max_blob_bytes
        ):
            self._recent_blob_sizes.popleft()
        offered = (part.digest for part in contributions.retained_parts)
        self._store.retain(
            set().union(*self._recent_blob_sizes, self._retained_states, offered, self._demand.held_digests())
        )

    async def _write_state_to_disk(self, digest: bytes) -> None:
        try:
            await asyncio.to_thread(self._store.move_to_disk, digest)
        except StorageError as error:
            self._errors.record_recovered("state gone", f"who is fetching an earlier state has to begin anew: {error}")
            self._store.discard(digest)

    async def save_in_background(self, replicated: ReplicatedState, contributions: ContributionTracker) -> None:
        """Save in the background, where the manifest says so; returns once the save before this one is on disk."""
        if self._is_save_due(replicated):
            await self.wait_until_saved()
            self._saving = asyncio.create_task(
                self._save_once_applied(_PendingSave.of(replicated, contributions)), name="checkpoint"
            )

    async def wait_until_announceable(self, replicated: ReplicatedState) -> None:
        """For people and peers to hear of its round: a kill may take back one that was told, and no two."""
        if self._is_save_due(replicated):
            await self.wait_until_saved()

    def _is_save_due(self, replicated: ReplicatedState) -> bool:
        return replicated.chain.round % self._options.every_rounds == 0

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
        if await self._trainer.wait_until_applied(pending.head.round):
            await self._write(pending)
        else:
            self.last_error = f"the trainer has not adopted round {pending.head.round} in time"
            self._errors.record_recovered("not saved", self.last_error)

    async def _write(self, pending: "_PendingSave") -> None:
        try:
            await asyncio.to_thread(self._write_files, pending)
            self.last_error = ""
        except StorageError as error:
            self.last_error = str(error)
            self._errors.record_recovered("not saved", self.last_error)

    def _write_files(self, pending: "_PendingSave") -> None:
        copied = self._shared_memory.copy_snapshot()
        inner = dict(copied[0].vectors) if copied else {}
        if copied:
            inner[CONTRIBUTION_VECTOR] = torch.frombuffer(bytearray(copied[1]), dtype=torch.uint8)
        taken = Checkpoint(
            run_id=self._options.run_id,
            shapes=self._options.shapes.hash(),
            round=pending.head.round,
            digest=pending.head.digest,
            chain={"head": pending.head.to_json(), "offer": pending.contributions},
            anchor=pending.state.anchor,
            outer=dict(pending.state.slots),
            inner=inner,
            inner_meta=copied[0].meta if copied else {},
        )
        checkpoint.save(self._options.directory, taken, self._options.shapes, self._options.keep)


@dataclass(frozen=True)
class _PendingSave:
    """What a save is to hold, taken at once: the replica moves on while it is written."""

    head: ChainHead
    state: OuterState
    contributions: dict[str, Any] | None

    @classmethod
    def of(cls, replicated: ReplicatedState, contributions: ContributionTracker) -> "_PendingSave":
        return cls(replicated.chain.head, replicated.state, contributions.to_json())

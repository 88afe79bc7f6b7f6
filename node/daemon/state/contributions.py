"""Keep the contributions of a replica on disk, and restore them so that no work counts twice.

`ContributionFile` stores the last contribution that other peers may have. A checkpoint may be older than it, and a node
that starts from that checkpoint would otherwise send the same work in another contribution.

After a restart, the trainer's last contribution may be newer than the checkpoint, and a round may include it. It then
carries the unsent work of the checkpoint's snapshot, which must not be sent twice. So the node changes the snapshot as
if the contribution had just been sent, in every value that it names; values that it does not name (a sparse one names
few) remain unsent. The steps since the checkpoint that it does not carry are lost, and so is the codec's rounding
error. If several contributions were made since, the earlier ones are unknown, and all unsent work is dropped.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from node.daemon.audits.work_log import WorkLog
from node.daemon.checkpoints.checkpoint import Checkpoint
from node.daemon.checkpoints.tensor_file import SavedInner
from node.loop.contributions import ContributionTracker, LastSent, SettledContribution, StoredContribution
from node.monitoring.status import ErrorRecorder
from node.processes.workers import RunInThread
from node.run_dir import write_atomically
from node.trainer.counters import Counters, Outstanding, SettledOutcome, StepTotals
from node.trainer.ipc.channel import ContributionHeader
from node.trainer.ipc.shared_memory import REFERENCE, RESIDUAL, SharedMemory, locally_trained_names
from optim.exchange import nonzero_mask
from optim.inner.adamw import AdamW
from optim.inner.eight_bit import EightBitAdamW
from optim.round_plan import RoundPlanner
from protocol.blobs.blob import Blob
from protocol.blobs.store import BlobStore
from protocol.errors import CheckpointError, MissingFileError, StorageError

logger = logging.getLogger(__name__)

TRACKER_KEY = "offer"  # in the chain's table of a checkpoint: the contributions
CONTRIBUTION_VECTOR = "outbox"  # the name of the contribution's bytes among a checkpoint's vectors
MOMENTS = frozenset((*AdamW.vectors, *EightBitAdamW.vectors))  # of both memory modes
OTHER_METHOD = "the checkpoint has the state of another method; choose another folder or remove it"


class ContributionFile:
    """Stores the last sent contribution of one replica; its parts are in the blob store."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, last_sent: LastSent) -> None:
        """Write the contribution; it is on disk when this returns. Raises StorageError."""
        values = {**last_sent.contribution.to_json(), "past": [entry.to_json() for entry in last_sent.settled]}
        write_atomically(self._path, json.dumps(values).encode())

    def load(self) -> LastSent | None:
        """Return the last sent contribution, None if there is none. Raises StorageError for a damaged file."""
        try:
            return _last_sent_from_json(json.loads(self._path.read_bytes()))
        except FileNotFoundError:
            return None
        except OSError as error:
            text = f"cannot read {self._path}: {error.strerror}; fix its folder or choose another --dir"
            raise StorageError(text) from error
        except (ValueError, TypeError, KeyError) as error:
            raise StorageError(f"{self._path} is damaged: remove it together with the folder checkpoints") from error

    def delete(self) -> None:
        """Delete the file, because a trainer without a snapshot restarts its serials. Raises StorageError."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot remove {self._path}: {error.strerror}; fix the permissions of its folder"
            ) from error


def _last_sent_from_json(values: dict[str, Any]) -> LastSent:
    return LastSent(
        StoredContribution.from_json(values), tuple(SettledContribution.from_json(entry) for entry in values["past"])
    )


def store_parts(store: BlobStore, shared_memory: SharedMemory, header: ContributionHeader) -> tuple[Blob, ...]:
    """Put the parts of the contribution that the trainer has just written into the store."""
    return tuple(store.put(part) for part in shared_memory.contribution_parts(header.sizes))


class ContributionIntake:
    """Stores what the trainer of one replica contributes: its parts as blobs, and the contribution in the file.

    Args:
        tracker: follows the contributions until a round includes them.
        store: takes the parts.
        memory: where the trainer writes a contribution.
        file: the file of the last one.
        run_in_thread: runs the work on the disk.
        work_log: keeps how contributions were made, in a run with audits.
    """

    def __init__(
        self, tracker: ContributionTracker, store: BlobStore, memory: SharedMemory, file: ContributionFile,
        run_in_thread: RunInThread, work_log: WorkLog | None = None,
    ) -> None:  # fmt: skip
        self.tracker = tracker
        self.lock = asyncio.Lock()  # held while the store has blobs that no contribution names yet
        self._store = store
        self._memory = memory
        self._file = file
        self._run_in_thread = run_in_thread
        self._work_log = work_log

    async def store(
        self, header: ContributionHeader, settled: tuple[SettledContribution, ...] | None
    ) -> StoredContribution:
        """Store a contribution; `settled` are those before it, or None if it will not be submitted."""
        stored: StoredContribution = await self._run_in_thread(self._write, header, settled)
        return stored

    def _write(self, header: ContributionHeader, settled: tuple[SettledContribution, ...] | None) -> StoredContribution:
        parts = store_parts(self._store, self._memory, header)
        work = None if self._work_log is None else self._work_log.record(header)
        contribution = StoredContribution(header, parts, work)
        if settled is not None:
            # On disk before a peer sees the contribution: a restarted node must not send its work a second time.
            self._file.save(LastSent(contribution, settled))
        return contribution


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
    tracker = ContributionTracker(planner)
    if saved is not None:
        tracker = ContributionTracker.from_json(planner, saved.chain.table[TRACKER_KEY])
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

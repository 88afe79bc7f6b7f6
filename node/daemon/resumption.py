"""How a node goes on from its disk: its trainer's part of a checkpoint, and the message that was on its way.

A message may have been made after the checkpoint, and a round may take it, or has. Then what the checkpoint's trainer
still had to say is in that message, and would be said twice. So the snapshot is made to look as if the message had just
been sent, wherever it says anything: what it does not carry (a sparse one names few values) is still to be said. What
is lost are the steps since the checkpoint that it does not carry, and what the code rounded away. Where several
messages were made since, the earlier ones are not known any more, and all that the snapshot had to say is dropped.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from node.arena import REFERENCE, RESIDUAL, SharedMemory, locally_trained_names
from node.checkpoints.checkpoint import Checkpoint
from node.daemon.metrics import RecoveredErrorKind
from node.daemon.offer_file import ContributionFile
from node.daemon.offers import StoredContribution, ContributionTracker, LastSent
from node.daemon.trainer_link import store_parts
from node.trainer.inner_state import Counters, Outstanding, SettledOutcome, StepTotals
from optim.exchange import nonzero_mask
from optim.program import RoundPlanner
from protocol.blobs.store import BlobStore
from protocol.errors import CheckpointError, MissingFileError

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
    saved: Checkpoint | None, program: RoundPlanner, shared_memory: SharedMemory, store: BlobStore, contribution_file: ContributionFile,
    record_recovered: Callable[[RecoveredErrorKind, str], None],
) -> ContributionTracker:  # fmt: skip
    """The message that is on its way: a round may have taken it while we were away, which must not happen twice.

    After `restore_inner`. Raises StorageError.
    """
    offers = ContributionTracker.from_json(program, saved.chain["offer"]) if saved else ContributionTracker(program)
    if saved is None or not saved.inner:
        contribution_file.delete()
        return offers
    counters = Counters.model_validate(saved.inner_meta)
    outstanding = None if counters.outstanding is None else counters.outstanding.to_header()
    offer = None if outstanding is None else StoredContribution(outstanding, store_parts(store, shared_memory, outstanding))
    last = contribution_file.load()
    later = offers.restore(offer, counters.messages, last, saved.round)
    if last is not None and later != "none":
        logger.info("a message was sent after the checkpoint; what it carries is not sent again")
        payloads = _read_payloads(last.contribution, store)
        if not payloads:
            record_recovered("message gone", "the last message is not on the disk any more: it is not offered again")
            offers.pending = None
        _account_for_sent(last, payloads, later == "one", offers, program, shared_memory)
    elif offers.pending is not None:
        contribution_file.save(LastSent(offers.pending, tuple(offers.settled)))
    return offers


def _account_for_sent(
    last_sent: LastSent, payloads: Sequence[bytes], is_first_since_snapshot: bool, contributions: ContributionTracker, program: RoundPlanner, shared_memory: SharedMemory
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
        "settled": tuple(SettledOutcome.from_header(entry.contribution.header, entry.outcome) for entry in last_sent.settled),
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


def subtract_sent_progress(program: RoundPlanner, vectors: Mapping[str, Tensor], round_number: int, payloads: Sequence[bytes]) -> None:
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

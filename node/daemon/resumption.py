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

from node.arena import REFERENCE, RESIDUAL, Arena, carried
from node.checkpoints.checkpoint import Checkpoint
from node.daemon.metrics import Setback
from node.daemon.offer_file import OfferFile
from node.daemon.offers import Offer, Offers, Sent
from node.daemon.trainer_link import stored_parts
from node.trainer.inner_state import Counters, Outstanding, Settled, Work
from optim.exchange import carried_by
from optim.program import Program
from protocol.blobs.store import BlobStore
from protocol.errors import CheckpointError, MissingFileError

logger = logging.getLogger(__name__)

OUTBOX = "outbox"  # the name of its bytes among a checkpoint's vectors


def restore_inner(saved: Checkpoint, arena: Arena) -> None:
    """Put the trainer's part of a checkpoint back where a trainer looks for it."""
    if not saved.inner:
        return
    outbox = saved.inner[OUTBOX].numpy().tobytes()
    arena.outbox[: len(outbox)] = outbox
    vectors = {name: vector for name, vector in saved.inner.items() if name != OUTBOX}
    if {name: vector.numel() for name, vector in vectors.items()} != dict(arena.contents.vectors):
        raise CheckpointError("the checkpoint holds the state of another method; choose another folder or remove it")
    arena.write_snapshot(vectors, saved.inner_meta)


def restored_offers(
    saved: Checkpoint | None, program: Program, arena: Arena, store: BlobStore, sent: OfferFile,
    set_back: Callable[[Setback, str], None],
) -> Offers:  # fmt: skip
    """The message that is on its way: a round may have taken it while we were away, which must not happen twice.

    After `restore_inner`. Raises StorageError.
    """
    offers = Offers.from_json(program, saved.chain["offer"]) if saved else Offers(program)
    if saved is None or not saved.inner:
        sent.forget()
        return offers
    counters = Counters.model_validate(saved.inner_meta)
    outstanding = None if counters.outstanding is None else counters.outstanding.message()
    offer = None if outstanding is None else Offer(outstanding, stored_parts(store, arena, outstanding))
    last = sent.load()
    later = offers.resume(offer, counters.messages, last, saved.round)
    if last is not None and later != "none":
        logger.info("a message was sent after the checkpoint; what it carries is not sent again")
        payloads = _payloads(last.offer, store)
        if not payloads:
            set_back("message gone", "the last message is not on the disk any more: it is not offered again")
            offers.current = None
        _overtake(last, payloads, later == "one", offers, program, arena)
    elif offers.current is not None:
        sent.save(Sent(offers.current, tuple(offers.past)))
    return offers


def _overtake(
    last: Sent, payloads: Sequence[bytes], is_next: bool, offers: Offers, program: Program, arena: Arena
) -> None:
    """`is_next`: it was the first message after the snapshot."""
    sent, snapshot = last.offer, arena.read_snapshot()
    assert snapshot is not None
    changed = (RESIDUAL, REFERENCE, *program.method.signal.consumes)
    vectors = {**snapshot.vectors, **{name: snapshot.vectors[name].clone() for name in changed}}
    forget(program, vectors, sent.message.round, payloads if is_next else [])
    outstanding = Outstanding.of(sent.message) if offers.current else None
    if outstanding is not None:
        message = b"".join(payloads)
        arena.outbox[: len(message)] = message
    said = {
        "messages": sent.message.serial,
        "outstanding": outstanding,
        "settled": tuple(Settled.of(entry.offer.message, entry.fate) for entry in last.past),
        "since_message": Work(),
        "unreported": Work(),
    }
    counters = Counters.model_validate(snapshot.meta).model_copy(update=said)
    arena.write_snapshot(vectors, counters.model_dump(mode="json"))


def _payloads(sent: Offer, store: BlobStore) -> list[bytes]:
    """None at all where a part is gone."""
    try:
        return [bytes(store.read(blob.digest)) for blob in sent.parts]
    except MissingFileError:
        return []


def forget(program: Program, vectors: Mapping[str, Tensor], round_number: int, payloads: Sequence[bytes]) -> None:
    """Take out of a trainer's vectors, in place, what the message of that round carries of its progress; of no
    payloads, all progress."""
    signal, residual, reference = program.method.signal, vectors[RESIDUAL], vectors[REFERENCE]
    live = torch.cat([vectors[name] for name in carried(program.method)])
    if payloads and signal.is_delta and not signal.consumes and residual.numel() == reference.numel():
        said = carried_by(program.plan(round_number), payloads, residual.numel())
        residual[said], reference[said] = 0.0, live[said]
        return
    residual.zero_()
    reference.copy_(live)
    for name in signal.consumes:
        vectors[name].zero_()

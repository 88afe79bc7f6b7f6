"""The bounds of every field of a peer record, in one table, because anybody may write a record. No I/O.

Counts of 64 bits that only the page shows have no bound here; the page clamps them.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from protocol.errors import MalformedError
from protocol.identity import PeerId
from protocol.manifest.sections import MAX_STAGES
from protocol.membership.records.kept_states import parse_kept_states
from protocol.membership.records.served_stages import parse_served_stages
from protocol.membership.records.source_losses import parse_source_losses
from protocol.murmur_pb2 import PeerRecord
from protocol.signing import MAX_CHAIN_TOKENS, MAX_ROUND, peer_id_of

ROLES = ("trainer", "observer")
MAX_TEXT_CHARACTERS = 64
MAX_PORT = 65535
MAX_ADDRESSES = 8
MAX_ADDRESS_CHARACTERS = 256
DIGEST_BYTES = (0, 32)
MAX_TICKET_BYTES = 512
MAX_VERDICTS = 64  # rounds


@dataclass(frozen=True)
class Bound:
    """The values that a field may have, and the words for another one."""

    accepts: Callable[[Any], bool]
    fault: str


ANYTHING = Bound(lambda value: True, "")
# Terminals and pages show these texts, so control characters are refused.
TEXT = Bound(
    lambda text: len(text) <= MAX_TEXT_CHARACTERS and text.isprintable(), "a text that is too long or not printable"
)
AMOUNT = Bound(lambda amount: math.isfinite(amount) and amount >= 0, "an amount that is negative or not finite")
NUMBER = Bound(math.isfinite, "a number that is not finite")
SHARE = Bound(lambda share: 0 <= share <= 1, "a share that is not between 0 and 1")
ROUND = Bound(lambda number: number <= MAX_ROUND, "a round above the maximum")
DIGEST = Bound(lambda digest: len(digest) in DIGEST_BYTES, "a digest of the wrong length")


def _parses(parse: Callable[[bytes], object]) -> Callable[[bytes], bool]:
    def accepts(data: bytes) -> bool:
        try:
            parse(data)
        except MalformedError:
            return False
        return True

    return accepts


FIELD_BOUNDS: dict[str, Bound] = {
    "role": Bound(lambda role: role in ROLES, "an unknown role"),
    "device": TEXT,
    "name": TEXT,
    "version": TEXT,
    "round": ROUND,
    "step": ANYTHING,
    "start": ANYTHING,
    "other_start": ANYTHING,
    "digest": DIGEST,
    "state_digest": DIGEST,
    "revision": DIGEST,
    "ticket": Bound(lambda ticket: len(ticket) <= MAX_TICKET_BYTES, "a ticket that is too long"),
    "stage": Bound(lambda stage: stage <= MAX_STAGES, "a stage above the maximum"),
    "kept": Bound(_parses(parse_kept_states), "kept states that are not valid"),
    "more_stages": Bound(_parses(parse_served_stages), "served stages that are not valid"),
    "stage_life": ANYTHING,
    "stage_move": Bound(lambda move: move <= MAX_STAGES + 1, "a move to a stage above the maximum"),
    "stage_rate": AMOUNT,
    "microbatches_done": ANYTHING,
    "microbatches_torn": ANYTHING,
    "microbatches_lost": ANYTHING,
    "microbatches_replayed": ANYTHING,
    "microbatches_dropped": ANYTHING,
    "step_decided": Bound(lambda decided: decided <= 2 * MAX_ROUND + 2, "a round above the maximum"),
    "step_round": ROUND,
    "step_verdicts": Bound(
        lambda verdicts: len(verdicts) <= MAX_VERDICTS and set(verdicts) <= {"a", "v"}, "unknown verdicts on steps"
    ),
    "chain_tokens": Bound(lambda tokens: tokens <= MAX_CHAIN_TOKENS, "a token count above the maximum"),
    "tokens": ANYTHING,
    "loss": NUMBER,
    "tokens_per_second": AMOUNT,
    "bytes_sent": ANYTHING,
    "leaving": ANYTHING,
    "validation_loss": AMOUNT,
    "validation_round": ROUND,
    "validation_by_source": Bound(_parses(parse_source_losses), "losses of sources that are not valid"),
    "compute_seconds": AMOUNT,
    "exchange_seconds": AMOUNT,
    "wait_seconds": AMOUNT,
    "resting": ANYTHING,
    "bytes_carried": ANYTHING,
    "direct_port": Bound(lambda port: port <= MAX_PORT, "an invalid port"),
    "learning_rate": AMOUNT,
    "gradient_norm": AMOUNT,
    "device_use": SHARE,
    "device_memory": ANYTHING,
    "device_memory_total": ANYTHING,
    "bytes_received": ANYTHING,
}


def check_fields(peer: PeerId, record: PeerRecord) -> None:
    """Raise MalformedError for a field out of its bounds."""
    for name, bound in FIELD_BOUNDS.items():
        if not bound.accepts(getattr(record, name)):
            raise MalformedError(f"the record of {peer} has {bound.fault}")


def check_addresses(peer: PeerId, addresses: Iterable[str]) -> None:
    """Raise MalformedError unless these are few, short addresses of this peer."""
    listed = list(addresses)
    if len(listed) > MAX_ADDRESSES:
        raise MalformedError(f"the record of {peer} has {len(listed)} of at most {MAX_ADDRESSES} addresses")
    for address in listed:
        is_plain = address.startswith("/") and address.isascii() and address.isprintable() and " " not in address
        if not is_plain or len(address) > MAX_ADDRESS_CHARACTERS:
            raise MalformedError(f"the record of {peer} has an invalid address")
        # Otherwise one peer could make all others dial a third one.
        if peer_id_of(address) != peer:
            raise MalformedError(f"the record of {peer} has the address of another peer")

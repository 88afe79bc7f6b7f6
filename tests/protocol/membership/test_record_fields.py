"""The table of bounds covers every field of a peer record."""

import math
from dataclasses import replace
from typing import Any

import pytest

from protocol.errors import MalformedError
from protocol.membership.record_fields import (
    ANYTHING,
    FIELD_BOUNDS,
    MAX_KEPT_STATES,
    MAX_TEXT_CHARACTERS,
    KeptState,
    check_fields,
    encode_kept_states,
    encode_source_losses,
    parse_kept_states,
    parse_source_losses,
)
from protocol.murmur_pb2 import KeptStates, PeerRecord

CHECKED_WITH_THE_CLOCK = {"sequence", "expires"}
CHECKED_WITH_THE_PEER = {"addresses"}


def kept_at(stage: int) -> KeptState:
    return KeptState(stage, 7, bytes(32), 100, bytes([1]) * 32)


BROKEN_STATE = KeptStates(states=[replace(kept_at(3), digest=b"short").to_wire()]).SerializeToString()
UNORDERED = KeptStates(states=[kept_at(stage).to_wire() for stage in (3, 1)]).SerializeToString()
TOO_MANY = encode_kept_states(kept_at(stage) for stage in range(MAX_KEPT_STATES + 1))
OUT_OF_BOUNDS: dict[str, tuple[Any, ...]] = {
    "step_decided": (2 * 2**24 + 3,),
    "role": ("king", ""),
    "device": ("a\nb",),
    "name": ("\x1b[2J", "n" * (MAX_TEXT_CHARACTERS + 1)),
    "version": ("v" * (MAX_TEXT_CHARACTERS + 1),),
    "round": (2**24 + 1,),
    "digest": (b"short",),
    "state_digest": (bytes(33),),
    "ticket": (bytes(513),),
    "validation_by_source": (
        bytes(7),
        encode_source_losses([-1.0]),
        encode_source_losses([math.nan]),
        encode_source_losses([1.0] * 17),
    ),
    "revision": (bytes(31),),
    "chain_tokens": (2**60 + 1,),
    "stage": (129,),
    "stage_move": (130,),
    "kept": (b"\xff", BROKEN_STATE, UNORDERED, TOO_MANY),
    "more_stages": (b"\xff", bytes(2048)),
    "loss": (math.nan, -math.inf),
    "validation_round": (2**64 - 1,),
    "direct_port": (65536,),
    "device_use": (1.01, -0.01, math.nan),
    "reward": (1.01, -0.01, math.nan),
} | dict.fromkeys(
    (
        "tokens_per_second", "validation_loss", "compute_seconds", "exchange_seconds", "wait_seconds",
        "learning_rate", "gradient_norm", "stage_rate",
    ),
    (-1.0, math.inf, math.nan),
)  # fmt: skip


def test_table_names_every_field_of_the_record() -> None:
    fields = {field.name for field in PeerRecord.DESCRIPTOR.fields}
    assert FIELD_BOUNDS.keys() == fields - CHECKED_WITH_THE_CLOCK - CHECKED_WITH_THE_PEER


def test_every_bound_has_a_value_that_it_refuses() -> None:
    assert OUT_OF_BOUNDS.keys() == {name for name, bound in FIELD_BOUNDS.items() if bound is not ANYTHING}


@pytest.mark.parametrize("name", OUT_OF_BOUNDS)
def test_value_out_of_bounds_is_refused(name: str) -> None:
    check_fields("a peer", PeerRecord(role="trainer"))  # control: the same record without the value
    for value in OUT_OF_BOUNDS[name]:
        record = PeerRecord(role="trainer")
        setattr(record, name, value)
        with pytest.raises(MalformedError):
            check_fields("a peer", record)


def test_kept_states_survive_the_record_in_the_order_of_their_stages() -> None:
    states = [replace(kept_at(5), state=b""), kept_at(0)]
    assert parse_kept_states(encode_kept_states(states)) == tuple(sorted(states))
    assert parse_kept_states(b"") == ()


def test_losses_of_sources_survive_the_record() -> None:
    assert parse_source_losses(encode_source_losses([1.25, 3.5])) == (1.25, 3.5) and parse_source_losses(b"") == ()

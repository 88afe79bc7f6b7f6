"""The table of bounds covers every field of a peer record."""

import math
from typing import Any

import pytest

from protocol.errors import MalformedError
from protocol.membership.record_fields import ANYTHING, FIELD_BOUNDS, MAX_TEXT_CHARACTERS, check_fields
from protocol.murmur_pb2 import PeerRecord

CHECKED_WITH_THE_CLOCK = {"sequence", "expires"}
CHECKED_WITH_THE_PEER = {"addresses"}
OUT_OF_BOUNDS: dict[str, tuple[Any, ...]] = {
    "role": ("king", ""),
    "device": ("a\nb",),
    "name": ("\x1b[2J", "n" * (MAX_TEXT_CHARACTERS + 1)),
    "version": ("v" * (MAX_TEXT_CHARACTERS + 1),),
    "round": (2**24 + 1,),
    "digest": (b"short",),
    "state_digest": (bytes(33),),
    "ticket": (bytes(513),),
    "revision": (bytes(31),),
    "chain_tokens": (2**60 + 1,),
    "stage": (129,),
    "loss": (math.nan, -math.inf),
    "validation_round": (2**64 - 1,),
    "direct_port": (65536,),
    "device_use": (1.01, -0.01, math.nan),
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

"""Updates of records: the same signed record comes out, and a receiver with another version gets the whole one."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.identity import Identity
from protocol.membership.peer_table import KEPT_VERSIONS, KIND, PeerTable
from protocol.membership.record_fields import apply_update, make_update
from protocol.murmur_pb2 import PeerRecord, RecordUpdate, Signed
from protocol.signing import sign

RUN, NOW, LIFETIME = "ab" * 32, 1_800_000_000.0, 15.0
ME = Identity.create()
ADDRESSES = [f"/ip4/10.0.0.1/tcp/{port}/p2p/{ME.peer_id}" for port in (4001, 4002, 4003)]
FIELDS: dict[str, Any] = {
    "addresses": ADDRESSES, "role": "trainer", "device": "cpu, 16 threads", "name": "somebody's desktop",
    "version": "0.1.0", "round": 117, "step": 58_000, "digest": bytes(range(32)), "state_digest": bytes(32),
    "chain_tokens": 10**9, "tokens": 10**8, "loss": 2.3, "tokens_per_second": 1234.5, "bytes_sent": 10**9,
    "compute_seconds": 1234.5, "exchange_seconds": 12.25, "wait_seconds": 99.5, "learning_rate": 3e-4,
    "gradient_norm": 0.75, "bytes_received": 10**9, "start": 2**60,
}  # fmt: skip
FIGURES: dict[str, Any] = {
    "step": 58_010, "tokens": 10**8 + 5000, "loss": 2.29, "bytes_sent": 10**9 + 5000, "compute_seconds": 1239.5,
    "wait_seconds": 101.5, "bytes_received": 10**9 + 7000,
}  # fmt: skip


def version(number: int, **changes: Any) -> tuple[Signed, PeerRecord]:
    record = PeerRecord(sequence=int(NOW * 1000) + number, expires=NOW + LIFETIME, **{**FIELDS, **changes})
    return sign(ME, KIND, RUN, record), record


CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "addresses": st.lists(st.sampled_from(ADDRESSES), max_size=3),
        "name": st.sampled_from(["", "a", "b"]),
        "round": st.integers(0, 3),
        "digest": st.sampled_from([b"", bytes(32), bytes([1]) * 32]),
        "leaving": st.booleans(),
        "device_use": st.sampled_from([0.0, 0.5]),
        "loss": st.sampled_from([0.0, -0.0, 1.5]),
    },
)


@settings(max_examples=200, deadline=None)
@given(CHANGES, CHANGES)
def test_update_yields_the_signed_record(before: dict[str, Any], after: dict[str, Any]) -> None:
    base, _ = version(0, **before)
    signed, record = version(1, **after)
    update = RecordUpdate.FromString(make_update(signed, record, base).SerializeToString())
    assert apply_update(update, base) == signed


def test_renewal_takes_less_than_half_of_the_record() -> None:
    base, _ = version(0)
    signed, record = version(1, **FIGURES)
    update = make_update(signed, record, base)
    assert update.ByteSize() < 210 and signed.ByteSize() > 600


def table_with(*versions: Signed) -> PeerTable:
    table = PeerTable(RUN, LIFETIME)
    for signed in versions:
        table.merge(signed, NOW)
    return table


def test_table_sends_updates_of_the_versions_that_it_has_kept() -> None:
    versions = [version(number, step=number)[0] for number in range(KEPT_VERSIONS + 2)]
    ours = table_with(*versions)
    for number, known in enumerate(versions[:-1]):
        theirs = table_with(known)
        low_half = theirs.sequence_of(ME.peer_id) % 2**32
        records, updates = ours.updates_for({ME.peer_id: low_half})
        assert (len(records), len(updates)) == ((1, 0) if number == 0 else (0, 1))
        restored, unresolved = theirs.restore(updates)
        assert not unresolved and [*records, *restored] == [versions[-1]]
    assert ours.updates_for({ME.peer_id: 0}) == ([versions[-1]], [])


def test_two_records_with_one_sequence_are_told_apart() -> None:
    """A liar signed both; whoever passes the third on is not blamed for a signature that does not fit."""
    one, other = version(0, name="a")[0], version(0, name="b")[0]
    newest = version(1)[0]
    sender, receiver = table_with(one, newest), table_with(other)
    _, updates = sender.updates_for({ME.peer_id: receiver.sequence_of(ME.peer_id) % 2**32})
    assert receiver.restore(updates) == ([], [ME.peer_id])


@pytest.mark.parametrize("update", [
    RecordUpdate(name=bytes(8), base=1),
    RecordUpdate(name=b"", cleared=[0, 9999, 2**32 - 1]),
    RecordUpdate(fields=PeerRecord(loss=math.nan)),
])  # fmt: skip
def test_updates_of_unknown_peers_are_ignored(update: RecordUpdate) -> None:
    assert table_with(version(0)[0]).restore([update]) == ([], [])

import itertools
import math
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ForgedError, LimitError, MalformedError, PeerFault, StaleError
from protocol.identity import Identity
from protocol.membership.clock import SwarmClock
from protocol.membership.peer_table import (
    CLOCK_TOLERANCE_SECONDS,
    KIND,
    RENEWAL_SHARE,
    OwnRecord,
    PeerTable,
    next_sequence,
)
from protocol.membership.record_fields import MAX_ADDRESSES
from protocol.membership.summary import Summary
from protocol.murmur_pb2 import PeerRecord, Signed
from protocol.signing import sign

RUN = "ab" * 32
NOW = 1_800_000_000.0
LIFETIME = 15.0
SEQUENCE = int(NOW * 1000)
IDENTITIES = [Identity.create() for _ in range(4)]
PEER = IDENTITIES[0].peer_id
NAMES = [identity.peer_id for identity in IDENTITIES]
SALT = bytes(8)


def record(identity: Identity = IDENTITIES[0], **fields: Any) -> Signed:
    body = PeerRecord(sequence=SEQUENCE, expires=NOW + LIFETIME, role="trainer")
    for name, value in fields.items():
        if name == "addresses":
            body.addresses.extend(value)
        else:
            setattr(body, name, value)
    return sign(identity, KIND, RUN, body)


def table_of(records: Iterable[Signed], now: float = NOW) -> PeerTable:
    table = PeerTable(RUN, LIFETIME)
    for signed in records:
        table.merge(signed, now)
    return table


def contents(table: PeerTable) -> dict[str, bytes]:
    return {signed.peer: signed.body for signed in table.records_of(table.known_sequences())}


def test_highest_sequence_wins_in_any_order() -> None:
    records = [record(sequence=SEQUENCE + step, name=str(step)) for step in range(3)]
    for order in itertools.permutations(records):
        assert table_of(order).live(NOW)[PEER].name == "2"


def test_merge_returns_only_newer_records() -> None:
    table = PeerTable(RUN, LIFETIME)
    assert table.merge(record(), NOW) is not None
    assert table.merge(record(), NOW) is None
    assert table.merge(record(sequence=SEQUENCE - 1), NOW) is None


RECORDS = st.lists(
    st.builds(
        lambda index, sequence, name, leaving: record(
            IDENTITIES[index], sequence=SEQUENCE + sequence, name=name, leaving=leaving
        ),
        st.integers(0, len(IDENTITIES) - 1),
        st.integers(0, 3),
        st.sampled_from(["", "a", "b"]),  # two bodies with one sequence come from a lying peer
        st.booleans(),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(RECORDS, st.randoms(use_true_random=False))
def test_merging_is_commutative_and_idempotent(records: list[Signed], rng: random.Random) -> None:
    shuffled = records + rng.sample(records, len(records) // 2)
    rng.shuffle(shuffled)
    assert contents(table_of(records)) == contents(table_of(shuffled))


@settings(max_examples=60, deadline=None)
@given(RECORDS, RECORDS)
def test_one_exchange_makes_two_tables_equal(ours: list[Signed], theirs: list[Signed]) -> None:
    """Push and pull: records with another sequence are exchanged, and nothing else."""
    one, other = table_of(ours), table_of(theirs)
    newer, wanted = Summary.of(one.known_sequences(), SALT).compare(other.known_sequences())
    pulled, pushed = other.records_of(newer), one.records_of(wanted.known_of(NAMES))
    assert not {signed.peer for signed in pulled} & {signed.peer for signed in pushed}
    for table, records in ((one, pulled), (other, pushed)):
        for signed in records:
            table.merge(signed, NOW)
    assert one.known_sequences() == other.known_sequences()
    assert Summary.of(one.known_sequences(), SALT).compare(other.known_sequences()) == ({}, Summary(SALT, {}))


def test_forged_altered_and_foreign_records_are_refused() -> None:
    honest = record()
    altered = Signed.FromString(honest.SerializeToString())
    altered.body = record(tokens=10**9).body
    foreign = sign(IDENTITIES[0], KIND, "cd" * 32, PeerRecord.FromString(honest.body))
    renamed = Signed.FromString(honest.SerializeToString())
    renamed.peer = IDENTITIES[1].peer_id
    table = PeerTable(RUN, LIFETIME)
    for signed in (altered, foreign, renamed):
        assert (
            PeerRecord.FromString(signed.body).role == "trainer"
        )  # control: without the signature all would be accepted
        with pytest.raises(ForgedError):
            table.merge(signed, NOW)
    assert len(table) == 0
    assert table.merge(honest, NOW) is not None


def test_replayed_record_does_not_revive_a_dead_peer() -> None:
    captured = record()
    table = table_of([captured])
    later = NOW + LIFETIME
    assert table.expire(later) == [PEER]
    with pytest.raises(StaleError):
        table.merge(captured, later)
    assert not table.live(later)


def test_silent_peer_expires_and_renewing_peer_stays() -> None:
    table = table_of([record(), record(IDENTITIES[1])])
    table.merge(record(IDENTITIES[1], sequence=SEQUENCE + 1, expires=NOW + 20), NOW + 10)
    assert set(table.live(NOW + LIFETIME)) == {IDENTITIES[1].peer_id}
    assert table.expire(NOW + LIFETIME) == [PEER]
    assert table.reason_left(PEER) == "expired"


def test_leaving_peer_is_not_revived_by_older_records() -> None:
    table = table_of([record(), record(sequence=SEQUENCE + 2, leaving=True)])
    assert not table.live(NOW) and table.reason_left(PEER) == "left"
    assert table.merge(record(sequence=SEQUENCE + 1), NOW) is None
    assert not table.live(NOW)
    assert contents(table).keys() == {PEER}  # it is passed on, so all learn of it


def test_suspected_peer_is_live_again_with_its_next_record() -> None:
    table = table_of([record()])
    table.suspect(PEER)
    assert not table.live(NOW) and table.reason_left(PEER) == "unreachable"
    table.merge(record(), NOW)  # an old record that still circulates proves nothing
    assert not table.live(NOW)
    table.merge(record(sequence=SEQUENCE + 1), NOW)
    assert PEER in table.live(NOW)
    table.suspect("nobody")
    assert len(table) == 1


def test_sequence_is_bounded_by_the_clock() -> None:
    """A sequence from the far future could never be overridden; without the bound the table would be stuck."""
    squatting = record(sequence=2**63)
    with pytest.raises(StaleError, match="no clock gives"):
        PeerTable(RUN, LIFETIME).merge(squatting, NOW)
    highest = SEQUENCE + int(CLOCK_TOLERANCE_SECONDS * 1000)
    table = table_of([record(sequence=highest)])
    with pytest.raises(StaleError):
        table.merge(record(sequence=highest + 1), NOW)
    assert table.merge(record(sequence=next_sequence(highest, NOW)), NOW + 1) is not None


def test_restarted_peer_overrides_its_former_record() -> None:
    sequence = next_sequence(-1, NOW)
    for step in range(100):
        sequence = next_sequence(sequence, NOW + step / 10_000)  # many updates within a few milliseconds
    table = table_of([record(sequence=sequence)])
    restarted = next_sequence(-1, NOW + 1)
    assert table.merge(record(sequence=restarted, name="again"), NOW + 1) is not None
    assert table.merge(record(sequence=1), NOW) is None  # control: a counter that restarts is ignored


def test_sequences_grow_and_one_of_a_wrong_clock_is_dropped() -> None:
    assert next_sequence(SEQUENCE, NOW) == SEQUENCE + 1
    assert next_sequence(SEQUENCE + 59_000, NOW) == SEQUENCE + 59_001
    assert next_sequence(SEQUENCE + 3_600_000, NOW) == SEQUENCE


BAD_FIELDS: dict[str, dict[str, Any]] = {
    "role": {"role": "king"},
    "no role": {"role": ""},
    "name long": {"name": "n" * 65},
    "name escapes": {"name": "\x1b[2J"},
    "device newline": {"device": "a\nb"},
    "digest": {"digest": b"short"},
    "state digest": {"state_digest": bytes(33)},
    "loss": {"loss": math.nan},
    "speed": {"tokens_per_second": math.inf},
    "port": {"direct_port": 65536},
    "round": {"round": 2**24 + 1},
    "chain tokens": {"chain_tokens": 2**60 + 1},
    "validation round": {"validation_round": 2**64 - 1},
    "negative speed": {"tokens_per_second": -1.0},
    "negative rate": {"learning_rate": -1e-3},
    "infinite norm": {"gradient_norm": math.inf},
    "use above one": {"device_use": 1.5},
    "use not a number": {"device_use": math.nan},
    "many addresses": {"addresses": [f"/ip4/1.1.1.1/tcp/{port}/p2p/{PEER}" for port in range(MAX_ADDRESSES + 1)]},
    "long address": {"addresses": ["/dns4/" + "a" * 300 + f"/tcp/1/p2p/{PEER}"]},
    "another's address": {"addresses": [f"/ip4/1.1.1.1/tcp/1/p2p/{IDENTITIES[1].peer_id}"]},
    "no address": {"addresses": ["http://example.org"]},
    "address with space": {"addresses": [f"/ip4/1.1.1.1 /tcp/1/p2p/{PEER}"]},
    "oversize": {"version": "v" * 3000},
}


@pytest.mark.parametrize("fields", BAD_FIELDS.values(), ids=BAD_FIELDS.keys())
def test_invalid_fields_are_refused(fields: dict[str, Any]) -> None:
    table = PeerTable(RUN, LIFETIME)
    with pytest.raises(MalformedError):
        table.merge(record(**fields), NOW)
    assert len(table) == 0


def test_valid_fields_are_accepted() -> None:
    fields: dict[str, Any] = {
        "addresses": [f"/ip4/1.1.1.1/tcp/1/p2p/{PEER}", f"/dns4/example.org/tcp/1/p2p/{PEER}"],
        "name": "Zürich 2",
        "digest": bytes(32),
        "loss": 1.5,
        "tokens_per_second": 10.0,
        "direct_port": 65535,
    }
    assert table_of([record(**fields)]).live(NOW)[PEER].name == "Zürich 2"


UNTIMELY: dict[str, dict[str, Any]] = {
    "expired": {"expires": NOW},
    "nan": {"expires": math.nan},
    "infinite": {"expires": math.inf},
    "late": {"expires": NOW + LIFETIME + CLOCK_TOLERANCE_SECONDS + 1},
    "sequence zero": {"sequence": 0},
}


@pytest.mark.parametrize("fields", UNTIMELY.values(), ids=UNTIMELY.keys())
def test_record_with_an_invalid_time_is_stale(fields: dict[str, Any]) -> None:
    with pytest.raises(StaleError):
        PeerTable(RUN, LIFETIME).merge(record(**fields), NOW)


def test_records_from_the_future_are_dropped_when_our_clock_is_set_back() -> None:
    """They would be live for hours, and no record could override them."""
    table = table_of([record()])
    earlier = NOW - 7200
    assert table.expire(earlier) == [PEER]
    right = record(sequence=int(earlier * 1000), expires=earlier + LIFETIME)
    assert table.merge(right, earlier) is not None


def flood(table: PeerTable, count: int, make: Callable[[int], Signed]) -> int:
    refused = 0
    for index in range(count):
        try:
            table.merge(make(index), NOW + index / 1e5)
        except PeerFault:
            refused += 1
    return refused


def test_flood_is_bounded_and_displaces_no_peer() -> None:
    """10^5 records of 300 newcomers against a table for 100 with 60 honest peers."""
    honest, sybils = [Identity.create() for _ in range(60)], [Identity.create() for _ in range(300)]
    table = PeerTable(RUN, LIFETIME, max_peers=100)
    for identity in honest:
        table.merge(record(identity), NOW)
    signed = [record(identity) for identity in sybils]
    started = time.process_time()
    refused = flood(table, 100_000, lambda index: signed[index % len(signed)])
    spent = time.process_time() - started
    assert len(table) == 100
    assert refused > 60_000
    assert {identity.peer_id for identity in honest} <= table.live(NOW).keys()
    # Nearly all are refused before the signature check, which alone would take about 12 s.
    assert spent < 6, f"{spent:.1f} s of CPU time"
    uncapped = PeerTable(RUN, LIFETIME)  # control
    flood(uncapped, len(signed), signed.__getitem__)
    assert len(uncapped) == 300


def test_full_table_accepts_a_newcomer_when_a_record_expires() -> None:
    table = PeerTable(RUN, LIFETIME, max_peers=2)
    table.merge(record(IDENTITIES[0]), NOW)
    table.merge(record(IDENTITIES[1], expires=NOW + 5), NOW)
    with pytest.raises(LimitError):
        table.merge(record(IDENTITIES[2]), NOW + 1)
    table.merge(record(IDENTITIES[0], sequence=SEQUENCE + 5), NOW + 1)  # known peers can still update
    assert table.merge(record(IDENTITIES[2]), NOW + 6) is not None
    assert set(table.live(NOW + 6)) == {IDENTITIES[0].peer_id, IDENTITIES[2].peer_id}


def test_own_record_is_renewed_for_news_and_long_before_it_expires() -> None:
    now, table = NOW, PeerTable(RUN, LIFETIME)
    own = OwnRecord(IDENTITIES[0], RUN, SwarmClock(lambda: now), LIFETIME)
    assert own.is_due()
    own.renew(table)
    assert not own.is_due()
    own.update_fields({"step": 3})
    assert not own.is_due()  # figures wait for the next renewal
    own.set_addresses([f"/memory/1/p2p/{PEER}"])
    assert own.is_due()
    own.renew(table)
    assert table.live(now)[PEER].step == 3
    own.set_addresses([f"/memory/1/p2p/{PEER}"])
    assert not own.is_due()
    now += RENEWAL_SHARE * LIFETIME
    assert own.is_due()

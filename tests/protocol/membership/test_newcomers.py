"""Unknown keys: how many a directory learns of, when they count as live, and what they cost."""

import random
import time
from collections.abc import Iterator, Sequence

import pytest

from protocol.errors import LimitError
from protocol.identity import Identity
from protocol.membership import known_peers
from protocol.membership.clock import SwarmClock
from protocol.membership.gossip import DirectoryOptions
from protocol.membership.known_peers import (
    CHECK_LIMITS,
    KEY_BURST,
    KEYS_PER_MINUTE,
    UNLIMITED_KEYS,
    CheckLimits,
    KnownPeers,
)
from protocol.membership.peer_table import KIND, MembershipEvent, PeerTable
from protocol.murmur_pb2 import PeerRecord, Signed
from protocol.signing import sign
from tests.protocol.membership.simulated_gossip import RUN

FLOOD = 3500  # the keys that stopped a victim for 34 seconds
BATCH = 250
LIFETIME = 60.0


def record_of(identity: Identity, now: float | None = None, addresses: Sequence[str] = ()) -> Signed:
    now = SwarmClock().now() if now is None else now
    return sign(identity, KIND, RUN, PeerRecord(sequence=int(now * 1000), expires=now + LIFETIME, role="observer"))


@pytest.fixture(scope="module")
def flood() -> list[Signed]:
    return [record_of(Identity.create()) for _ in range(FLOOD)]


class CountingListener:
    """Looks at all live peers whenever something changes, as the round loop does."""

    def __init__(self, known: KnownPeers) -> None:
        self._known = known
        self.calls = self.visited = 0

    def on_membership_changed(self, events: Sequence[MembershipEvent]) -> None:
        self.calls += 1
        self.visited += len(self._known.live())


def open_table(bootstrap: Sequence[str] = ()) -> KnownPeers:
    options = DirectoryOptions(run_id=RUN, heartbeat=1.0, expiry=LIFETIME, bootstrap=bootstrap)
    known = KnownPeers(options, Identity.create(), SwarmClock(), random.Random(0))
    known.renew()
    return known


def batches(records: Sequence[Signed]) -> Iterator[Sequence[Signed]]:
    return (records[start : start + BATCH] for start in range(0, len(records), BATCH))


def send_flood(known: KnownPeers, flood: Sequence[Signed], sender: str) -> None:
    """Merge the flood as the calls of one sender that follow each other at once."""
    for batch in batches(flood):
        known.merge(batch, sender, time.monotonic())
        known.notify_listeners()


def test_flood_of_fresh_keys_costs_little(flood: list[Signed], monkeypatch: pytest.MonkeyPatch) -> None:
    liar = Identity.create()

    def visits() -> tuple[int, int, int]:
        known = open_table()
        listener = CountingListener(known)
        known.subscribe(listener)
        known.merge([record_of(liar)], liar.peer_id, time.monotonic())
        send_flood(known, flood, liar.peer_id)
        return listener.calls, listener.visited, len(known.table)

    calls, visited, size = visits()
    assert calls <= 1 + FLOOD // BATCH
    assert size <= UNLIMITED_KEYS + KEYS_PER_MINUTE + 1
    # The control: without the quotas the same calls make the listener look at many times as many peers, although it
    # is called once a call; as it was once called for each new peer, n keys made it look at n squared.
    monkeypatch.setattr(known_peers, "UNLIMITED_KEYS", 10 * FLOOD)
    endless = CheckLimits(10 * FLOOD, 1, 10 * FLOOD, 1)
    monkeypatch.setattr(known_peers, "CHECK_LIMITS", {origin: endless for origin in CHECK_LIMITS})
    naive_calls, naive_visited, naive_size = visits()
    assert naive_size == FLOOD + 2
    assert naive_visited > 10 * visited, (calls, visited, naive_calls, naive_visited)


def test_many_connections_together_bring_few_keys_a_second(flood: list[Signed]) -> None:
    known, started = open_table(), 1000.0
    senders = [Identity.create() for _ in range(100)]
    for second in range(10):
        for number, sender in enumerate(senders):
            share = flood[number * 35 : number * 35 + 35]
            known.merge(share[second * 3 : second * 3 + 3], sender.peer_id, started + second)
    others = 10 * known_peers.KEYS_PER_SECOND + KEY_BURST
    assert len(known.table) <= UNLIMITED_KEYS + others + 1


def test_keys_that_speak_for_themselves_do_not_compete_with_a_flood(flood: list[Signed]) -> None:
    known, now = open_table(), 1000.0
    for number, batch in enumerate(batches(flood)):
        known.merge(batch, f"liar {number}", now)
    honest = [Identity.create() for _ in range(KEY_BURST)]
    for peer in honest:
        known.merge([record_of(peer)], peer.peer_id, now)
    assert {peer.peer_id for peer in honest} <= known.live().keys()


def test_key_counts_as_live_once_it_has_spoken_or_a_voucher_names_it() -> None:
    friend, stranger, voter = Identity.create(), Identity.create(), Identity.create()
    first, second, third = Identity.create(), Identity.create(), Identity.create()
    known = open_table(bootstrap=[f"/memory/1/p2p/{friend.peer_id}"])
    known.set_voters(frozenset({voter.peer_id}))
    for sender in (friend, stranger, voter):
        known.merge([record_of(sender)], sender.peer_id, 0.0)
    known.merge([record_of(first)], stranger.peer_id, 0.0)
    assert first.peer_id not in known.live() and first.peer_id in known.table.unconfirmed()
    known.merge([record_of(second)], friend.peer_id, 0.0)
    known.merge([record_of(third)], voter.peer_id, 0.0)
    assert known.live().keys() >= {second.peer_id, third.peer_id}
    known.merge([], first.peer_id, 0.0)  # it calls us
    assert first.peer_id in known.live()


def test_key_that_nobody_vouches_for_is_not_passed_on() -> None:
    """Otherwise an honest voter would vouch for the keys that a stranger sent it."""
    stranger, voter, fresh = Identity.create(), Identity.create(), Identity.create()
    known, record = open_table(), record_of(fresh)
    known.set_voters(frozenset({voter.peer_id}))
    known.merge([record_of(stranger), record], stranger.peer_id, 0.0)
    assert fresh.peer_id in known.table  # the control: a table that passed on all that it has would name it
    assert known.table.known_sequences().keys() == {known.peer_id, stranger.peer_id}
    known.merge([record], voter.peer_id, 0.0)  # not newer, but a voter's word
    assert fresh.peer_id in known.table.known_sequences() and fresh.peer_id in known.live()


def test_newer_record_of_a_live_peer_is_taken_from_anybody() -> None:
    stranger, peer = Identity.create(), Identity.create()
    known = open_table()
    known.set_voters(frozenset({"12D3KooW"}))
    now = SwarmClock().now()
    known.merge([record_of(peer, now - 1)], peer.peer_id, 0.0)
    known.merge([record_of(peer, now)], stranger.peer_id, 0.0)
    assert known.live()[peer.peer_id].sequence == int(now * 1000)


def test_swarm_that_starts_together_is_known_at_once() -> None:
    seed = Identity.create()
    known = open_table(bootstrap=[f"/memory/1/p2p/{seed.peer_id}"])
    others = [record_of(Identity.create()) for _ in range(50)]
    known.merge([record_of(seed), *others], seed.peer_id, 0.0)
    assert len(known.live()) == 52


def test_forged_records_cost_few_verifications_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    forged = [record_of(Identity.create()) for _ in range(40)]
    for signed in forged:
        signed.signature = bytes(64)
    known = open_table()
    merged = known.merge(forged, "liar", 0.0)
    assert len(merged.faults) == known_peers.MAX_FALSE_RECORDS
    monkeypatch.setattr(known_peers, "MAX_FALSE_RECORDS", 1000)
    assert len(known.merge(forged, "liar", 0.0).faults) == len(forged)  # the control


def test_verifications_of_a_stranger_are_limited(flood: list[Signed]) -> None:
    known, stranger = open_table(), Identity.create()
    known.set_voters(frozenset({Identity.create().peer_id}))
    peers = [Identity.create() for _ in range(32)]
    base = SwarmClock().now() - 30
    accepted = 0
    for step in range(30):
        records = [record_of(peer, base + step) for peer in peers]
        accepted += len(known.merge(records, stranger.peer_id, 0.0).news)
    assert accepted <= CHECK_LIMITS["other"].burst
    assert accepted < 30 * len(peers)  # the control: without a limit each one would be verified


@pytest.mark.parametrize("is_voter", [True, False])
def test_voter_finds_a_place_in_a_full_table_and_keeps_it(is_voter: bool) -> None:
    now, table, voter = SwarmClock().now(), PeerTable(RUN, LIFETIME, max_peers=4), Identity.create()
    table.protected = frozenset({voter.peer_id}) if is_voter else frozenset()
    for _ in range(4):
        table.merge(record_of(Identity.create(), now), now)
    if not is_voter:  # the control: anybody else waits
        with pytest.raises(LimitError):
            table.merge(record_of(voter, now), now)
        return
    table.merge(record_of(voter, now - 1), now)
    for _ in range(20):
        with pytest.raises(LimitError):
            table.merge(record_of(Identity.create(), now), now)
    assert voter.peer_id in table.live(now)


def test_peer_that_has_spoken_displaces_one_that_never_did() -> None:
    now, table = SwarmClock().now(), PeerTable(RUN, LIFETIME, max_peers=4)
    for _ in range(4):
        signed = record_of(Identity.create(), now)
        record = table.read_news(signed, now)
        assert record is not None
        table.accept(signed, record, now, is_confirmed=False)
    speaker = Identity.create()
    table.merge(record_of(speaker, now), now)
    assert table.live(now).keys() == {speaker.peer_id} and len(table) == 4

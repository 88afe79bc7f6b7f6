import logging
import random
from pathlib import Path

import pytest

from protocol.errors import ManifestError
from protocol.identity import Identity
from protocol.membership.contacts import (
    FEW_PEERS,
    MAX_ADDRESSES,
    MAX_WAIT_ALONE_SECONDS,
    MAX_WAIT_SECONDS,
    REMEMBER_SECONDS,
    SAVE_INTERVAL_SECONDS,
    AddressFile,
    Contacts,
    load_addresses,
    save_addresses,
)

PEERS = [Identity.create().peer_id for _ in range(5)]


def address(peer: str, port: int = 1) -> str:
    return f"/ip4/10.0.0.1/tcp/{port}/p2p/{peer}"


def due(contacts: Contacts, now: float, present: tuple[str, ...] = (), count: int = 10) -> set[str]:
    return {contact.peer for contact in contacts.pick_due(now, present, count)}


def test_bootstrap_peer_is_retried_for_ever_at_growing_intervals() -> None:
    contacts = Contacts([address(PEERS[0])], random.Random(1))
    now, waits = 0.0, []
    for _ in range(200):
        assert due(contacts, now) == {PEERS[0]}
        waits.append(contacts.record_failure(PEERS[0], now))
        assert due(contacts, now + waits[-1] * 0.99) == set()
        now += waits[-1]
    assert waits[:6] == sorted(waits[:6]) and waits[0] < 2 and waits[10] > 30
    assert max(waits) <= 1.3 * MAX_WAIT_SECONDS and len(set(waits[20:])) > 100  # jitter
    assert now > 2 * REMEMBER_SECONDS


def test_warnings_of_a_silent_bootstrap_peer_become_rarer_and_a_former_peer_causes_none() -> None:
    contacts = Contacts([address(PEERS[0])], random.Random(1))
    contacts.add(PEERS[1], [address(PEERS[1])], now=0.0)
    warned = []
    for failure in range(1, 33):
        for peer in PEERS[:2]:
            contacts.record_failure(peer, failure)
        warned += [failure] * contacts.should_warn(PEERS[0])
        assert not contacts.should_warn(PEERS[1]) and not contacts.should_warn(PEERS[2])
    assert warned == [1, 2, 4, 8, 16, 32]


def test_contact_that_said_goodbye_is_not_due_until_it_is_heard_of_again() -> None:
    contacts = Contacts([address(PEERS[0])], random.Random(1))
    for peer in PEERS[:2]:
        contacts.record_news(peer, [address(peer)], 0.0, has_left=False)
    contacts.add(PEERS[2], [address(PEERS[2])], 0.0)  # the control: it said nothing
    for peer in PEERS[:2]:
        contacts.record_news(peer, [address(peer)], 1.0, has_left=True)
    assert due(contacts, 1000.0) == {PEERS[2]}
    contacts.record_news(PEERS[1], [address(PEERS[1])], 1000.0, has_left=False)
    assert due(contacts, 1000.0) == {PEERS[1], PEERS[2]}
    assert contacts.addresses().keys() == set(PEERS[:3]), "for the next start"


def test_bootstrap_peer_that_said_goodbye_is_due_once_a_minute_while_no_peer_is_live() -> None:
    contacts = Contacts([address(PEERS[0])], random.Random(1))
    contacts.record_news(PEERS[0], [address(PEERS[0])], 0.0, has_left=True)
    assert contacts.pick_due(MAX_WAIT_SECONDS - 1, (), 1, is_alone=True) == []
    assert [contact.peer for contact in contacts.pick_due(MAX_WAIT_SECONDS, (), 1, is_alone=True)] == [PEERS[0]]
    contacts.record_failure(PEERS[0], MAX_WAIT_SECONDS)
    assert not contacts.should_warn(PEERS[0])
    assert contacts.pick_due(MAX_WAIT_SECONDS + 30, (), 1, is_alone=True) == []


def test_contact_that_left_and_has_a_new_address_is_due_again() -> None:
    contacts = Contacts([], random.Random(1))
    contacts.record_news(PEERS[0], [address(PEERS[0])], 0.0, has_left=True)
    contacts.add(PEERS[0], [address(PEERS[0])], 1.0)
    assert due(contacts, 1.0) == set()
    contacts.add(PEERS[0], [address(PEERS[0], 2)], 2.0)  # announced in the DHT
    assert due(contacts, 2.0) == {PEERS[0]}


def test_node_without_live_peers_retries_sooner() -> None:
    contacts = Contacts([address(PEERS[0])], random.Random(2))
    for _ in range(10):
        contacts.record_failure(PEERS[0], 0.0)
    now = MAX_WAIT_ALONE_SECONDS
    assert [contact.peer for contact in contacts.pick_due(now, (), 1, is_alone=True)] == [PEERS[0]]
    assert due(contacts, now) == set(), "the control: while other peers are live"
    assert contacts.pick_due(now - 0.1, (), 1, is_alone=True) == []


def test_success_ends_the_wait() -> None:
    contacts = Contacts([address(PEERS[0])], random.Random(2))
    for _ in range(10):
        contacts.record_failure(PEERS[0], 0.0)
    contacts.record_success(PEERS[0], 1.0)
    assert due(contacts, 1.0) == {PEERS[0]}
    assert contacts.record_failure(PEERS[0], 1.0) < 2


def test_live_peers_are_not_tried() -> None:
    contacts = Contacts(map(address, PEERS), random.Random(3))
    assert due(contacts, 0.0, present=tuple(PEERS[:2])) == set(PEERS[2:])
    assert len(due(contacts, 0.0, count=2)) == 2


def test_former_peer_is_remembered_for_an_hour() -> None:
    contacts = Contacts([], random.Random(4))
    contacts.add(PEERS[0], [address(PEERS[0])], now=0.0)
    contacts.add(PEERS[1], [], now=0.0)  # without an address
    assert due(contacts, REMEMBER_SECONDS) == {PEERS[0]}
    assert due(contacts, REMEMBER_SECONDS + 1) == set() and len(contacts) == 0


def test_contacts_are_bounded_and_bootstrap_peers_stay() -> None:
    contacts = Contacts([address(PEERS[0])], random.Random(5), max_contacts=3)
    for index, peer in enumerate(PEERS):
        contacts.add(peer, [address(peer)], float(index))
    assert due(contacts, 10.0) == {PEERS[0], PEERS[3], PEERS[4]}


def test_bootstrap_address_outlives_newer_ones() -> None:
    contacts = Contacts([address(PEERS[0])], random.Random(6))
    contacts.add(PEERS[0], [address(PEERS[0], port) for port in range(2, 20)], now=0.0)
    addresses = contacts.addresses()[PEERS[0]]
    assert address(PEERS[0]) in addresses and len(addresses) == MAX_ADDRESSES


def test_news_do_not_shorten_the_wait_after_a_failure() -> None:
    contacts = Contacts([], random.Random(7))
    contacts.add(PEERS[0], [address(PEERS[0])], now=0.0)
    wait = contacts.record_failure(PEERS[0], 0.0)
    contacts.add(PEERS[0], [address(PEERS[0])], now=wait / 2)
    assert due(contacts, wait / 2) == set()


def test_bootstrap_address_without_a_peer_id_is_refused() -> None:
    with pytest.raises(ManifestError, match="does not end in /p2p/<peer id>; add it"):
        Contacts(["/ip4/10.0.0.1/tcp/1"], random.Random(8))


def test_addresses_survive_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "addresses.json"
    assert load_addresses(file) == {}
    known = {peer: (address(peer, 1), address(peer, 2)) for peer in PEERS}
    save_addresses(file, known)
    assert load_addresses(file) == known
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("text", ["", "{", '{"a": 1}', "[1]", '["/ip4/1.1.1.1/tcp/1"]', "\0" * 100])
def test_broken_file_is_logged_and_skipped(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "addresses.json"
    file.write_text(text)
    assert load_addresses(file) == {}
    assert [record.levelno for record in caplog.records] == [logging.WARNING] and str(file) in caplog.text


def test_failed_save_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_addresses(tmp_path / "missing" / "addresses.json", {})
    assert "cannot save the addresses" in caplog.text


def test_first_peers_are_saved_at_once_and_later_ones_soon(tmp_path: Path) -> None:
    names = [Identity.create().peer_id for _ in range(FEW_PEERS + 1)]
    known = {name: (address(name),) for name in names}
    file = AddressFile(tmp_path / "addresses.json", 0.0)
    for count in range(1, FEW_PEERS + 1):
        some = {name: known[name] for name in names[:count]}
        file.save_if_due(some, 0.1)
        assert AddressFile(tmp_path / "addresses.json", 0.0).load() == some
    file.save_if_due(known, 0.2)
    assert len(file.load()) == FEW_PEERS
    file.save_if_due(known, SAVE_INTERVAL_SECONDS + 0.3)
    assert file.load() == known
    AddressFile(None, 0.0).save(known, 1.0)
    assert AddressFile(None, 0.0).load() == {}

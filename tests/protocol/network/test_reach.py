"""Who is hidden, and whom a hidden peer asks to relay."""

import ipaddress

import pytest

from protocol.network.control import _encoded
from protocol.network.reach import MAX_RELAYS, carriers_of, is_hidden, is_public, own_address, relays_for

PEER = "12D3KooWEVEvub4rCrm7Kqwv1Z4yXVKWi7Vmd7b4dsKQdTT3rVHo"
CONTACT = f"/ip4/8.8.8.8/tcp/4001/p2p/{PEER}"
EVERYWHERE = "/ip4/0.0.0.0/tcp/4001"


def test_an_address_that_others_can_use_is_told() -> None:
    assert ipaddress.ip_address(own_address())


def test_who_can_be_called_only_through_a_relay() -> None:
    circuit = f"{CONTACT}/p2p-circuit/p2p/12D3KooWother"
    assert is_hidden([EVERYWHERE, circuit]) and not is_hidden([CONTACT, circuit]) and not is_hidden([EVERYWHERE])


def test_who_relays_to_a_peer() -> None:
    circuit = f"{CONTACT}/p2p-circuit/p2p/12D3KooWother"
    assert carriers_of([CONTACT]) == ()
    assert carriers_of([EVERYWHERE, circuit, f"/ip4/8.8.4.4/udp/1/quic/p2p/{PEER}/p2p-circuit"]) == (PEER,)
    assert carriers_of(["/p2p-circuit"]) == ()
    assert len(carriers_of([f"/p2p/{number}/p2p-circuit" for number in range(9)])) == MAX_RELAYS


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("/ip4/8.8.8.8/tcp/1", True),
        ("/ip6/2606:4700::1/tcp/1", True),
        ("/ip4/192.168.1.2/tcp/1", False),
        ("/ip4/127.0.0.1/tcp/1", False),
        ("/ip4/100.64.0.1/tcp/1", False),
        ("/ip4/not-an-address/tcp/1", False),
        (f"{CONTACT}/p2p-circuit/p2p/{PEER}", False),
        ("/dns4/example.org/tcp/1", False),
        ("", False),
    ],
)
def test_public_addresses(address: str, expected: bool) -> None:
    assert is_public(address) is expected


@pytest.mark.parametrize(
    ("listen", "outward", "hidden"),
    [
        (EVERYWHERE, "192.168.1.2", True),
        (EVERYWHERE, "8.8.4.4", False),
        ("/ip4/192.168.1.2/tcp/1", "8.8.4.4", True),
        ("/ip4/127.0.0.1/tcp/0", "192.168.1.2", False),
        (EVERYWHERE, "127.0.0.1", False),
    ],
    ids=["at home", "public", "at home by choice", "this machine alone", "no network"],
)
def test_only_the_hidden_look_for_a_relay(listen: str, outward: str, hidden: bool) -> None:
    assert relays_for([listen], [CONTACT], outward) == ((CONTACT,) if hidden else ())


def test_who_is_hidden_itself_is_no_relay() -> None:
    circuit = f"{CONTACT}/p2p-circuit/p2p/{PEER}"
    many = [CONTACT.replace("4001", str(port)) for port in range(1, 9)]
    assert relays_for([EVERYWHERE], [circuit, CONTACT], "10.0.0.1") == (CONTACT,)
    assert relays_for([EVERYWHERE], [circuit, *many], "10.0.0.1") == tuple(many[:MAX_RELAYS])


def test_a_circuits_address_as_p2pd_reads_it() -> None:
    """In the middle of an address, too, a peer's id is a multihash: identity, 36 bytes."""
    encoded = _encoded(f"{CONTACT}/p2p-circuit")
    assert encoded.hex().startswith("0408080808060fa1" + "a50326" + "0024080112")
    assert encoded.hex().endswith("a202") and len(encoded) == 8 + 3 + 38 + 2
    assert _encoded("/ip4/8.8.8.8/tcp/4001").hex() == "0408080808060fa1"

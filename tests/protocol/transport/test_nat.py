"""Who is hidden, and whom a hidden peer asks to relay."""

import ipaddress

import pytest

from protocol.transport.libp2p.client import _encode_address
from protocol.transport.nat import MAX_RELAYS, choose_relays, find_own_ip, is_public_address, is_relay_only, relays_of

PEER = "12D3KooWEVEvub4rCrm7Kqwv1Z4yXVKWi7Vmd7b4dsKQdTT3rVHo"
CONTACT = f"/ip4/8.8.8.8/tcp/4001/p2p/{PEER}"
EVERYWHERE = "/ip4/0.0.0.0/tcp/4001"


def test_an_address_that_others_can_use_is_told() -> None:
    assert ipaddress.ip_address(find_own_ip())


def test_who_can_be_called_only_through_a_relay() -> None:
    circuit = f"{CONTACT}/p2p-circuit/p2p/12D3KooWother"
    assert (
        is_relay_only([EVERYWHERE, circuit])
        and not is_relay_only([CONTACT, circuit])
        and not is_relay_only([EVERYWHERE])
    )


def test_who_relays_to_a_peer() -> None:
    circuit = f"{CONTACT}/p2p-circuit/p2p/12D3KooWother"
    assert relays_of([CONTACT]) == ()
    assert relays_of([EVERYWHERE, circuit, f"/ip4/8.8.4.4/udp/1/quic/p2p/{PEER}/p2p-circuit"]) == (PEER,)
    assert relays_of(["/p2p-circuit"]) == ()
    assert len(relays_of([f"/p2p/{number}/p2p-circuit" for number in range(9)])) == MAX_RELAYS


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
    assert is_public_address(address) is expected


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
    assert choose_relays([listen], [CONTACT], outward) == ((CONTACT,) if hidden else ())


def test_who_is_hidden_itself_is_no_relay() -> None:
    circuit = f"{CONTACT}/p2p-circuit/p2p/{PEER}"
    many = [CONTACT.replace("4001", str(port)) for port in range(1, 9)]
    assert choose_relays([EVERYWHERE], [circuit, CONTACT], "10.0.0.1") == (CONTACT,)
    assert choose_relays([EVERYWHERE], [circuit, *many], "10.0.0.1") == tuple(many[:MAX_RELAYS])


def test_a_circuits_address_as_p2pd_reads_it() -> None:
    """In the middle of an address, too, a peer's id is a multihash: identity, 36 bytes."""
    encoded = _encode_address(f"{CONTACT}/p2p-circuit")
    assert encoded.hex().startswith("0408080808060fa1" + "a50326" + "0024080112")
    assert encoded.hex().endswith("a202") and len(encoded) == 8 + 3 + 38 + 2
    assert _encode_address("/ip4/8.8.8.8/tcp/4001").hex() == "0408080808060fa1"

"""Public addresses, and the choice of relays behind NAT."""

import ipaddress
import socket

import pytest

from protocol.transport import nat
from protocol.transport.nat import (
    MAX_RELAYS,
    choose_relays,
    find_common_port,
    find_own_ip,
    is_port_free,
    is_public_address,
    is_relay_only,
    listen_on_all_interfaces,
    relays_of,
)
from protocol.transport.p2pd import _encode_address

PEER = "12D3KooWEVEvub4rCrm7Kqwv1Z4yXVKWi7Vmd7b4dsKQdTT3rVHo"
CONTACT = f"/ip4/8.8.8.8/tcp/4001/p2p/{PEER}"
EVERYWHERE = "/ip4/0.0.0.0/tcp/4001"


def test_own_ip_is_an_ip_address() -> None:
    assert ipaddress.ip_address(find_own_ip())


def test_peer_is_relay_only_without_a_public_address() -> None:
    circuit = f"{CONTACT}/p2p-circuit/p2p/12D3KooWother"
    assert (
        is_relay_only([EVERYWHERE, circuit])
        and not is_relay_only([CONTACT, circuit])
        and not is_relay_only([EVERYWHERE])
    )


def test_relays_are_read_from_addresses() -> None:
    circuit = f"{CONTACT}/p2p-circuit/p2p/12D3KooWother"
    assert relays_of([CONTACT]) == ()
    assert relays_of([EVERYWHERE, circuit, f"/ip4/8.8.4.4/udp/1/quic/p2p/{PEER}/p2p-circuit"]) == (PEER,)
    assert relays_of(["/p2p-circuit"]) == ()
    assert len(relays_of([f"/p2p/{index}/p2p-circuit" for index in range(9)])) == MAX_RELAYS


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
    ("listen", "own_ip", "hidden"),
    [
        (EVERYWHERE, "192.168.1.2", True),
        (EVERYWHERE, "8.8.4.4", False),
        ("/ip4/192.168.1.2/tcp/1", "8.8.4.4", True),
        ("/ip4/127.0.0.1/tcp/0", "192.168.1.2", False),
        (EVERYWHERE, "127.0.0.1", False),
    ],
    ids=["at home", "public", "at home by choice", "this machine alone", "no network"],
)
def test_only_nodes_behind_nat_choose_relays(listen: str, own_ip: str, hidden: bool) -> None:
    assert choose_relays([listen], [CONTACT], own_ip) == ((CONTACT,) if hidden else ())


def test_relayed_peer_is_not_chosen_as_a_relay() -> None:
    circuit = f"{CONTACT}/p2p-circuit/p2p/{PEER}"
    many = [CONTACT.replace("4001", str(port)) for port in range(1, 9)]
    assert choose_relays([EVERYWHERE], [circuit, CONTACT], "10.0.0.1") == (CONTACT,)
    assert choose_relays([EVERYWHERE], [circuit, *many], "10.0.0.1") == tuple(many[:MAX_RELAYS])


def test_relayed_address_is_encoded_for_p2pd() -> None:
    """In the middle of an address, too, a peer id is encoded as a multihash: identity, 36 bytes."""
    encoded = _encode_address(f"{CONTACT}/p2p-circuit")
    assert encoded.hex().startswith("0408080808060fa1" + "a50326" + "0024080112")
    assert encoded.hex().endswith("a202") and len(encoded) == 8 + 3 + 38 + 2
    assert _encode_address("/ip4/8.8.8.8/tcp/4001").hex() == "0408080808060fa1"


def test_ports_of_both_families_are_probed() -> None:
    with socket.socket(socket.AF_INET6) as other:
        other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        other.bind(("::", 0))
        other.listen()
        port = other.getsockname()[1]
        assert not is_port_free(port, socket.AF_INET6) and is_port_free(port, socket.AF_INET)
    common = find_common_port()
    assert is_port_free(common, socket.AF_INET6) and is_port_free(common, socket.AF_INET)


def test_machine_without_ipv6_listens_on_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    both = listen_on_all_interfaces()
    monkeypatch.setattr(nat, "is_port_free", lambda port, family: family == socket.AF_INET)
    assert listen_on_all_interfaces() == both[:1]


def test_node_without_ipv4_needs_no_relay_with_a_public_address() -> None:
    everywhere = ["/ip4/0.0.0.0/tcp/1", "/ip6/::/tcp/1"]
    assert choose_relays(everywhere, [CONTACT], "2606:4700::1") == ()
    assert choose_relays(everywhere, [CONTACT], "fd00::1") == choose_relays(everywhere, [CONTACT], "10.0.0.1") != ()

"""Whether others can call this machine, and who may carry their calls to it where they cannot.

Behind a home router a peer opens connections but receives none. It keeps a place at a relay that it can call (libp2p's
circuit relay v2), and tells the relay's address as a way to itself: whoever calls there is connected through it, end
to end encrypted. Peers that are hidden both meet in no other way.
"""

import ipaddress
import socket
from collections.abc import Sequence

CIRCUIT_MARKER = "/p2p-circuit"
MAX_RELAYS = 4
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public_address(address: str) -> bool:
    """Whether a multiaddress is a machine's own, and its IP address one that the whole internet can reach."""
    host = None if CIRCUIT_MARKER in address else _ip_of(address)
    return host is not None and host.is_global


def choose_relays(listen_addresses: Sequence[str], known_addresses: Sequence[str], own_ip: str) -> tuple[str, ...]:
    """Of the peers that we can ask, those that may relay to us: none where we are reachable without, or want not to be.

    `listen`, `contacts`: multiaddresses. `outward`: our IP address towards the internet.
    """
    hosts = [ipaddress.ip_address(own_ip) if host.is_unspecified else host for host in map(_ip_of, listen_addresses) if host]
    if any(host.is_global for host in hosts) or all(host.is_loopback for host in hosts):
        return ()
    return tuple(address for address in known_addresses if CIRCUIT_MARKER not in address)[:MAX_RELAYS]


def is_relay_only(addresses: Sequence[str]) -> bool:
    """Whether a peer with these multiaddresses can be called only through a relay."""
    return any(CIRCUIT_MARKER in address for address in addresses) and not any(map(is_public_address, addresses))


def relays_of(addresses: Sequence[str]) -> tuple[str, ...]:
    """Whom a peer with these multiaddresses has asked to relay to it, each once: ids as it wrote them, unchecked."""
    ways = [address.partition(CIRCUIT_MARKER)[0].rpartition("/p2p/")[2] for address in addresses if CIRCUIT_MARKER in address]
    return tuple(dict.fromkeys(way for way in ways if way))[:MAX_RELAYS]


def find_own_ip() -> str:
    """The address that this machine has towards the internet; connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _ip_of(address: str) -> IpAddress | None:
    """Of a multiaddress such as /ip4/192.0.2.1/tcp/4001; None where it begins with a name."""
    kind, _, rest = address.lstrip("/").partition("/")
    try:
        return ipaddress.ip_address(rest.partition("/")[0]) if kind in ("ip4", "ip6") else None
    except ValueError:
        return None

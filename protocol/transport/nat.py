"""NAT traversal: whether other peers can reach this machine, relays where they cannot, and dial-back probes.

A peer behind a home router opens connections but receives none. It reserves a slot at a relay that it can reach
(libp2p's circuit relay v2) and publishes the relay's address as its own; callers of that address are connected through
the relay, encrypted end to end. Two peers that are both behind NAT have no other way to connect.

A dial-back probe finds out whether the caller is reachable: it dials the ports that the caller names, at the host that
its call comes from. Nobody can abuse it to scan other machines: the host is taken from the connection and not from the
request, and a caller behind a relay is not probed. The reply says only whether a libp2p peer answers, so it reveals
nothing about other services. Each caller is served once a minute, and all callers together only a few times.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from protocol.errors import LimitError, MalformedError
from protocol.identity import PeerId
from protocol.murmur_pb2 import DialBackReply
from protocol.transport.rate_limit import SharedTokenBuckets, TokenBuckets

CIRCUIT_MARKER = "/p2p-circuit"
ANY_IPV4, ANY_IPV6 = "/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"
PORT_ATTEMPTS = 16
MAX_RELAYS = 4
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public_address(address: str) -> bool:
    """Return whether a multiaddress is direct and public.

    A public IP address is reachable from the whole internet.
    """
    host = None if CIRCUIT_MARKER in address else _ip_of(address)
    return host is not None and host.is_global


def choose_relays(listen_addresses: Sequence[str], known_addresses: Sequence[str], own_ip: str) -> tuple[str, ...]:
    """Return the peers that may relay to us.

    There are none if we are reachable directly or listen on loopback only.

    All addresses are multiaddresses; `own_ip` is our IP address towards the internet.
    """
    hosts = [
        ipaddress.ip_address(own_ip) if host.is_unspecified else host for host in map(_ip_of, listen_addresses) if host
    ]
    if any(host.is_global for host in hosts) or all(host.is_loopback for host in hosts):
        return ()
    return tuple(address for address in known_addresses if CIRCUIT_MARKER not in address)[:MAX_RELAYS]


def is_relay_only(addresses: Sequence[str]) -> bool:
    """Return whether a peer with these multiaddresses needs a relay."""
    return any(CIRCUIT_MARKER in address for address in addresses) and not any(map(is_public_address, addresses))


def relays_of(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the distinct relays in a peer's multiaddresses, unvalidated."""
    relays = [
        address.partition(CIRCUIT_MARKER)[0].rpartition("/p2p/")[2]
        for address in addresses
        if CIRCUIT_MARKER in address
    ]
    return tuple(dict.fromkeys(relay for relay in relays if relay))[:MAX_RELAYS]


def find_own_ip() -> str:
    """Return this machine's address towards the internet: that of IPv4, or of IPv6 on a machine without IPv4.

    Connecting a datagram socket sends nothing.
    """
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def listen_on_all_interfaces() -> tuple[str, ...]:
    """Return the multiaddresses of all interfaces, for IPv4 and for IPv6 as far as this machine has them."""
    families = ((socket.AF_INET, ANY_IPV4), (socket.AF_INET6, ANY_IPV6))
    return tuple(address for family, address in families if is_port_free(0, family)) or (ANY_IPV4,)


def find_common_port() -> int:
    """Return a port that is free for IPv4 and IPv6, 0 if this machine lacks one of the two."""
    for _ in range(PORT_ATTEMPTS):
        with suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(("::", 0))
            if is_port_free(port := int(probe.getsockname()[1]), socket.AF_INET):
                return port
    return 0


def is_port_free(port: int, family: socket.AddressFamily) -> bool:
    """Return whether a TCP port of all interfaces can be bound; port 0 asks whether the machine has the family."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))
    except OSError:
        return False
    return True


def _ip_of(address: str) -> IpAddress | None:
    """Return the IP address in a multiaddress, or None if it begins with a name.

    An example is /ip4/192.0.2.1/tcp/4001.
    """
    kind, _, rest = address.lstrip("/").partition("/")
    try:
        return ipaddress.ip_address(rest.partition("/")[0]) if kind in ("ip4", "ip6") else None
    except ValueError:
        return None


logger = logging.getLogger(__name__)

MAX_PORTS = 2
PROBE_SECONDS = 5.0
CALL_PERIOD_SECONDS = 60.0  # between two calls of one peer
MAX_CALLS_PER_PERIOD = 20  # of all peers together
LIBP2P_GREETING = b"\x13/multistream/1.0.0\n"  # the first bytes that a libp2p listener sends
RemoteAddresses = Callable[[PeerId], Awaitable[Sequence[str]]]
ProbePort = Callable[[str, int], Awaitable[bool]]


async def is_libp2p_listening(host: str, port: int) -> bool:
    """Return whether a libp2p peer listens there, without sending anything."""
    writer: asyncio.StreamWriter | None = None
    with suppress(OSError, EOFError, TimeoutError):
        async with asyncio.timeout(PROBE_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            greeting = await reader.readexactly(len(LIBP2P_GREETING))
        writer.transport.abort()
        return greeting == LIBP2P_GREETING
    if writer is not None:
        writer.transport.abort()
    return False


def find_direct_host(addresses: Sequence[str]) -> tuple[str, str] | None:
    """Return the first address without a relay, and the host in it."""
    for address in addresses:
        _, _, rest = address.partition("/")
        kind, _, tail = rest.partition("/")
        if kind in ("ip4", "ip6") and CIRCUIT_MARKER not in address:
            host = tail.partition("/")[0]
            with suppress(ValueError):
                return address, str(ipaddress.ip_address(host))
    return None


class DialBackResponder:
    """Answers dial-back requests.

    `remote_addresses` returns the remote ends of our connections with a peer.
    """

    def __init__(self, remote_addresses: RemoteAddresses, probe_port: ProbePort = is_libp2p_listening) -> None:
        self._remote_addresses = remote_addresses
        self._probe_port = probe_port
        overall = TokenBuckets(MAX_CALLS_PER_PERIOD, MAX_CALLS_PER_PERIOD / CALL_PERIOD_SECONDS)
        self._call_quota = SharedTokenBuckets(TokenBuckets(1, 1 / CALL_PERIOD_SECONDS), overall)

    async def probe_ports(self, peer: PeerId, ports: Sequence[int], now: float) -> DialBackReply:
        """Probe a caller's ports at the host that its call comes from.

        `now` is in seconds, monotonic.

        Raises:
            MalformedError: Too many ports, or an invalid one.
            LimitError: The caller, or all callers together, asked too often.
        """
        if len(ports) > MAX_PORTS or not all(0 < port < 65536 for port in ports):
            raise MalformedError(f"{peer} names {len(ports)} ports or an invalid one; at most {MAX_PORTS} are allowed")
        if exhausted := self._call_quota.charge(peer, now):
            period = f"more than once in {CALL_PERIOD_SECONDS:.0f} s"
            when = period if exhausted == "caller" else "while too many others do"
            raise LimitError(f"{peer} asks for a dial-back {when}; try again later")
        found = find_direct_host(await self._remote_addresses(peer))
        if found is None:
            return DialBackReply()
        address, host = found
        answers = await asyncio.gather(*(self._probe_port(host, port) for port in ports))
        logger.debug("connected to %s at %s as it asked: %d of %d ports answer", peer, host, sum(answers), len(ports))
        return DialBackReply(seen=address, open=[port for port, is_open in zip(ports, answers, strict=True) if is_open])

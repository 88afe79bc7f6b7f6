"""Whether others can call this machine, and who may carry their calls to it where they cannot.

Behind a home router a peer opens connections but receives none. It keeps a place at a relay that it can call (libp2p's
circuit relay v2), and tells the relay's address as a way to itself: whoever calls there is connected through it, end
to end encrypted. Peers that are hidden both meet in no other way.

Whether a peer can be reached from here: knock at the ports that it names, at the host that its call comes from.

Nobody can have others knocked at by this. The host is not the caller's to say but what its connection shows; a caller
behind a relay is not tried. What is told is only whether a libp2p peer greets there, so that nothing is learnt of
other services, and each caller is served once a minute, all callers together a few times.
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
    hosts = [
        ipaddress.ip_address(own_ip) if host.is_unspecified else host for host in map(_ip_of, listen_addresses) if host
    ]
    if any(host.is_global for host in hosts) or all(host.is_loopback for host in hosts):
        return ()
    return tuple(address for address in known_addresses if CIRCUIT_MARKER not in address)[:MAX_RELAYS]


def is_relay_only(addresses: Sequence[str]) -> bool:
    """Whether a peer with these multiaddresses can be called only through a relay."""
    return any(CIRCUIT_MARKER in address for address in addresses) and not any(map(is_public_address, addresses))


def relays_of(addresses: Sequence[str]) -> tuple[str, ...]:
    """Whom a peer with these multiaddresses has asked to relay to it, each once: ids as it wrote them, unchecked."""
    ways = [
        address.partition(CIRCUIT_MARKER)[0].rpartition("/p2p/")[2]
        for address in addresses
        if CIRCUIT_MARKER in address
    ]
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


logger = logging.getLogger(__name__)

MAX_PORTS = 2
PROBE_SECONDS = 5.0
CALL_PERIOD_SECONDS = 60.0  # seconds between two calls of one peer
MAX_CALLS_PER_PERIOD = 20  # calls of all peers together
LIBP2P_GREETING = b"\x13/multistream/1.0.0\n"  # what a libp2p listener says first
RemoteAddresses = Callable[[PeerId], Awaitable[Sequence[str]]]
ProbePort = Callable[[str, int], Awaitable[bool]]


async def is_libp2p_listening(host: str, port: int) -> bool:
    """Whether a libp2p peer listens there; says nothing itself."""
    writer: asyncio.StreamWriter | None = None
    with suppress(OSError, EOFError, TimeoutError):
        async with asyncio.timeout(PROBE_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            said = await reader.readexactly(len(LIBP2P_GREETING))
        writer.transport.abort()
        return said == LIBP2P_GREETING
    if writer is not None:
        writer.transport.abort()
    return False


def find_direct_host(addresses: Sequence[str]) -> tuple[str, str] | None:
    """The first address that no relay stands behind, and the host in it."""
    for address in addresses:
        _, _, rest = address.partition("/")
        kind, _, tail = rest.partition("/")
        if kind in ("ip4", "ip6") and CIRCUIT_MARKER not in address:
            host = tail.partition("/")[0]
            with suppress(ValueError):
                return address, str(ipaddress.ip_address(host))
    return None


class DialBackResponder:
    """`seen`: the far ends of the connections with a peer."""

    def __init__(self, remote_addresses: RemoteAddresses, probe_port: ProbePort = is_libp2p_listening) -> None:
        self._remote_addresses = remote_addresses
        self._probe_port = probe_port
        together = TokenBuckets(MAX_CALLS_PER_PERIOD, MAX_CALLS_PER_PERIOD / CALL_PERIOD_SECONDS)
        self._call_quota = SharedTokenBuckets(TokenBuckets(1, 1 / CALL_PERIOD_SECONDS), together)

    async def probe_ports(self, peer: PeerId, ports: Sequence[int], now: float) -> DialBackReply:
        """`now` in seconds, monotonic. Raises MalformedError and LimitError."""
        if len(ports) > MAX_PORTS or not all(0 < port < 65536 for port in ports):
            raise MalformedError(f"{peer} names {len(ports)} ports, or one that is none; at most {MAX_PORTS}")
        if lack := self._call_quota.charge(peer, now):
            much = f"more than once in {CALL_PERIOD_SECONDS:.0f} s" if lack == "caller" else "while too many others do"
            raise LimitError(f"{peer} asks to be dialled back {much}; try again later")
        found = find_direct_host(await self._remote_addresses(peer))
        if found is None:
            return DialBackReply()
        address, host = found
        answers = await asyncio.gather(*(self._probe_port(host, port) for port in ports))
        logger.info("dialled %s back at %s: %d of %d ports answer", peer, host, sum(answers), len(ports))
        return DialBackReply(seen=address, open=[port for port, heard in zip(ports, answers, strict=True) if heard])

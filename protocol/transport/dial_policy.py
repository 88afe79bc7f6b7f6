"""Dial other peers by a policy: which of their addresses a node dials, and how often.

Records and the DHT name addresses, and anybody may write a record. Without a policy, a few records make a whole swarm
knock at a third party, or at services that only this machine or its network can reach. So:

- An address on the internet may be dialled. One that is not may be only if it is in the /24 (IPv6: /64) network of an
  address of ours, or in the same special block as a contact that the user or the manifest names (a lab). Loopback
  addresses are for nodes that have no others, or whose contacts are on loopback.
- An endpoint (address and port) where a peer has proved its key is dialled for it at any time, and for a minute for no
  other. An endpoint where a dial failed is tried again after 10 s, then after twice as long each time; where this peer
  proved its key before, after 20 s at most, so that a network that was down for long is whole again soon.
- Failed dials are limited for each address and for all of them together.
- Names are resolved first, and their addresses are judged like others.

A lookup of a name cannot be cancelled: if a name server does not answer, its thread stays for half a minute. Other
peers choose the names, so these threads serve nothing else, and there are only a few of them.
"""

import asyncio
import ipaddress
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from protocol.errors import UnreachableError
from protocol.identity import PeerId
from protocol.recent import RecentTable
from protocol.transport.nat import CIRCUIT_MARKER, IpAddress
from protocol.transport.p2pd import P2pdClient
from protocol.transport.rate_limit import TokenBuckets

MAX_ENDPOINTS = 4096
MAX_NAMES = 2  # in the addresses of a peer
FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 10.0, 3600.0
MAX_WAIT_PROVED_SECONDS = 20.0  # for a peer that was found there before
PROOF_SECONDS = 60.0  # for which an endpoint belongs to the peer that proved its key there
HOST_FAILURES, HOST_FAILURES_PER_SECOND = 16, 8 / 60
ALL_FAILURES, ALL_FAILURES_PER_SECOND = 128, 1.0
SPECIAL_BLOCKS = tuple(
    map(
        ipaddress.ip_network,
        ("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.2.0/24",
         "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "::1/128", "fc00::/7", "fe80::/10",
         "2001:db8::/32"),
    )
)  # fmt: skip
NAME_KINDS = ("dns", "dns4", "dns6")
MAX_LOOKUPS = 2
MAX_QUEUED_LOOKUPS = 64  # all connections to a peer, and some to others
Lookup = Callable[..., Sequence[Any]]  # like socket.getaddrinfo
RESOLVE_SECONDS = 5.0
MAX_ROUTES = 8


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host, an IP address or a name, and a port."""

    host: str
    port: int


def endpoint_of(route: str) -> Endpoint | None:
    """Return the endpoint that a multiaddress begins with: the relay's in a circuit; None if there is none."""
    words = route.split("/")
    if len(words) < 5 or words[3] not in ("tcp", "udp") or not words[4].isdecimal():
        return None
    return Endpoint(words[2], int(words[4])) if words[1] in ("ip4", "ip6", *NAME_KINDS) else None


def parse_ip(host: str) -> IpAddress | None:
    """Return an IP address, None for a name; an IPv4 address in IPv6 form counts as itself."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


@dataclass
class _Failures:
    count: int
    until: float
    last_owner: PeerId | None = None  # the peer that proved its key at the endpoint last


class DialPolicy:
    """The dials of one node; times are in seconds, monotonic. `contacts`: multiaddresses that the user trusts."""

    def __init__(self, contacts: Iterable[str]) -> None:
        found = [endpoint for route in contacts if (endpoint := endpoint_of(route)) is not None]
        self._trusted = frozenset(found)
        self._contact_hosts = [address for endpoint in found if (address := parse_ip(endpoint.host)) is not None]
        self._own: list[IpAddress] = []
        self._proofs = RecentTable[Endpoint, tuple[PeerId, float]](MAX_ENDPOINTS)
        self._failures = RecentTable[Endpoint, _Failures](MAX_ENDPOINTS)
        self._host_failures = TokenBuckets(HOST_FAILURES, HOST_FAILURES_PER_SECOND)
        self._all_failures = TokenBuckets(ALL_FAILURES, ALL_FAILURES_PER_SECOND)

    def set_own_addresses(self, addresses: Iterable[str]) -> None:
        """Set the addresses at which this node listens."""
        endpoints = (endpoint_of(address) for address in addresses if CIRCUIT_MARKER not in address)
        hosts = (parse_ip(endpoint.host) for endpoint in endpoints if endpoint is not None)
        self._own = [host for host in hosts if host is not None]

    def is_trusted(self, endpoint: Endpoint) -> bool:
        """Return whether the user or the manifest names this endpoint."""
        return endpoint in self._trusted

    def admits(self, peer: PeerId, endpoint: Endpoint, now: float) -> bool:
        """Return whether a peer may be dialled at an endpoint now. A name must be resolved before, or be trusted."""
        if endpoint in self._trusted:
            return True
        host = parse_ip(endpoint.host)
        if host is None or not self.is_reachable(host):
            return False
        owner, proved_at = self._proofs.get(endpoint, ("", float("-inf")))
        if owner == peer:
            return True
        if now - proved_at < PROOF_SECONDS:
            return False
        failures = self._failures.get(endpoint)
        if failures is not None and now < failures.until:
            return False
        return self._host_failures.tokens_left(str(host), now) >= 1 and self._all_failures.tokens_left("", now) >= 1

    def has_proved(self, peer: PeerId, endpoint: Endpoint) -> bool:
        """Return whether this peer was the last one that proved its key at an endpoint."""
        failures = self._failures.get(endpoint)
        owner = failures.last_owner if failures is not None else self._proofs.get(endpoint, ("", 0.0))[0]
        return owner == peer

    def is_reachable(self, host: IpAddress) -> bool:
        """Return whether an address is on the internet, in our own network or in that of our contacts."""
        if host.is_multicast or host.is_unspecified or host.is_reserved and not host.is_loopback:
            return False
        if host.is_global:
            return True
        if host.is_loopback and self._own and all(own.is_loopback for own in self._own):
            return True
        is_near = not host.is_loopback and any(_are_neighbours(host, own) for own in self._own)
        return is_near or any(_share_block(host, contact) for contact in self._contact_hosts)

    def record_proof(self, peer: PeerId, endpoint: Endpoint, now: float) -> None:
        """Record that a peer has proved its key at an endpoint."""
        self._failures.pop(endpoint, None)
        self._proofs[endpoint] = peer, now

    def record_failure(self, peer: PeerId, endpoint: Endpoint, now: float) -> None:
        """Record that a peer was not found at an endpoint."""
        if endpoint in self._trusted:
            return
        if self._proofs.get(endpoint, ("", 0.0))[0] == peer:
            del self._proofs[endpoint]  # it may have moved; the next failure counts
            self._failures[endpoint] = _Failures(0, now, peer)
            return
        failures = self._failures.get(endpoint) or _Failures(0, now)
        longest = MAX_WAIT_PROVED_SECONDS if peer == failures.last_owner else MAX_WAIT_SECONDS
        wait = min(longest, FIRST_WAIT_SECONDS * 2.0 ** min(failures.count, 16))
        self._failures[endpoint] = _Failures(failures.count + 1, now + wait, failures.last_owner)
        self._host_failures.try_take(str(parse_ip(endpoint.host)), now)
        self._all_failures.try_take("", now)


def _are_neighbours(host: IpAddress, own: IpAddress) -> bool:
    prefix = 24 if own.version == 4 else 64
    return host.version == own.version and host in ipaddress.ip_network((own, prefix), strict=False)


def _share_block(host: IpAddress, contact: IpAddress) -> bool:
    return any(host in block and contact in block for block in SPECIAL_BLOCKS if block.version == host.version)


def may_name(hosts: Sequence[IpAddress], sources: Sequence[IpAddress]) -> bool:
    """Return whether a manifest from elsewhere may name an endpoint with these addresses.

    The internet may name the internet alone; a machine of a private network also that network, and our own machine all.

    Args:
        hosts: the addresses of the endpoint.
        sources: the addresses of the machine that the manifest came from.
    """
    for host in hosts:
        if host.is_link_local or host.is_multicast or host.is_unspecified or host.is_reserved and not host.is_loopback:
            return False
        if not (host.is_global or any(each.is_loopback or _share_block(host, each) for each in sources)):
            return False
    return True


class Resolver:
    """Resolves host names; the caller sets the timeout."""

    def __init__(self, lookup: Lookup = socket.getaddrinfo) -> None:
        self._lookup = lookup
        self._free_threads = asyncio.Semaphore(MAX_LOOKUPS)
        self._queued = 0

    async def resolve(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host name; an IP address resolves to itself.

        Raises:
            OSError, UnicodeError: The name does not exist or is invalid.
            UnreachableError: Too many lookups wait already.
        """
        if _is_address(host):
            return [host]
        if self._queued >= MAX_QUEUED_LOOKUPS:
            raise UnreachableError(f"{host}: too many names are being looked up")
        self._queued += 1
        try:
            await self._free_threads.acquire()
        finally:
            self._queued -= 1
        found = await asyncio.shield(self._start_lookup(host, port))
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    def _start_lookup(self, host: str, port: int) -> "asyncio.Future[Sequence[Any]]":
        """Start a lookup whose slot is freed when its thread ends.

        Its caller may be gone by then.
        """
        future: Future[Sequence[Any]] = Future()
        future.set_running_or_notify_cancel()
        result = asyncio.wrap_future(future)
        result.add_done_callback(self._on_lookup_done)
        # A daemon thread, because the process must not wait for it at exit.
        threading.Thread(
            target=self._run_lookup, args=(host, port, future), name="lookup of a name", daemon=True
        ).start()
        return result

    def _run_lookup(self, host: str, port: int, future: "Future[Sequence[Any]]") -> None:
        try:
            future.set_result(self._lookup(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            future.set_exception(error)

    def _on_lookup_done(self, result: "asyncio.Future[Sequence[Any]]") -> None:
        self._free_threads.release()
        _ = result.cancelled() or result.exception()  # retrieve it, because its caller may be gone


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class GuardedDials:
    """The dials over libp2p of one node."""

    def __init__(self, policy: DialPolicy, resolver: Resolver, refusals: Counter[str]) -> None:
        self.policy = policy
        self._resolver = resolver
        self.refusals = refusals

    async def connect(self, client: P2pdClient, peer: PeerId, routes: Sequence[str], timeout: float) -> None:
        """Connect to a peer at the routes that the policy admits, unless it is connected already.

        Raises UnreachableError.
        """
        if await client.remote_addresses(peer):
            return
        admitted = await self.choose(peer, routes)
        if not admitted:
            self.refusals["not dialled"] += 1
            raise UnreachableError(f"no address of {peer} may be dialled now")
        try:
            await client.connect(peer, tuple(admitted), timeout)
        except UnreachableError:
            self.record_failure(peer, admitted)
            raise
        self.record_proofs(peer, admitted, await client.remote_addresses(peer))

    async def choose(self, peer: PeerId, routes: Sequence[str]) -> list[str]:
        """Return the routes that may be dialled now, with addresses in place of names."""
        resolved = [route for route in routes if not self._has_strange_name(route)]
        for route in [route for route in routes if self._has_strange_name(route)][:MAX_NAMES]:
            resolved += await self._resolve(route)
        now = time.monotonic()
        return [route for route in resolved[:MAX_ROUTES] if self._is_admitted(peer, route, now)]

    def record_failure(self, peer: PeerId, routes: Sequence[str]) -> None:
        """Record that a peer answered at none of these routes."""
        for route in routes:
            endpoint = endpoint_of(route)
            if endpoint is not None and CIRCUIT_MARKER not in route:  # the relay may be well
                self.policy.record_failure(peer, endpoint, time.monotonic())

    def record_proofs(self, peer: PeerId, routes: Sequence[str], remote_addresses: Sequence[str]) -> None:
        """Record the routes at which a connection with a peer ends now."""
        connected = {endpoint_of(address) for address in remote_addresses if CIRCUIT_MARKER not in address}
        for route in routes:
            endpoint = endpoint_of(route)
            if endpoint is not None and endpoint in connected:
                self.policy.record_proof(peer, endpoint, time.monotonic())

    def _is_admitted(self, peer: PeerId, route: str, now: float) -> bool:
        endpoint = endpoint_of(route)
        return endpoint is not None and self.policy.admits(_owner_of(peer, route), endpoint, now)

    def _has_strange_name(self, route: str) -> bool:
        endpoint = endpoint_of(route)
        return endpoint is not None and parse_ip(endpoint.host) is None and not self.policy.is_trusted(endpoint)

    async def _resolve(self, route: str) -> list[str]:
        """Return a route with each address of its name, none if it has none; the policy judges them later."""
        _, kind, name, *rest = route.split("/")
        if kind not in NAME_KINDS:
            return []
        try:
            async with asyncio.timeout(RESOLVE_SECONDS):
                addresses = await self._resolver.resolve(name, 0)
        except (OSError, UnicodeError, UnreachableError, TimeoutError):
            return []
        return ["/".join(["", "ip6" if ":" in address else "ip4", address, *rest]) for address in addresses]


def _owner_of(peer: PeerId, route: str) -> PeerId:
    """Return the peer that listens at the endpoint of a route: the relay in a circuit."""
    relay = route.partition(CIRCUIT_MARKER)[0].rpartition("/p2p/")[2]
    return relay if CIRCUIT_MARKER in route and relay else peer

"""Which addresses of other peers a node dials, and how often. No I/O.

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
"""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from protocol.identity import PeerId
from protocol.recent import RecentTable
from protocol.transport.nat import CIRCUIT_MARKER, IpAddress
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

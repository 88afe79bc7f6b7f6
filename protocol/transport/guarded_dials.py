"""Apply the policy of dials to the routes of a peer: resolve names, choose, and record how a dial ended."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

from protocol.errors import UnreachableError
from protocol.identity import PeerId
from protocol.transport.dial_policy import MAX_NAMES, NAME_KINDS, DialPolicy, endpoint_of, parse_ip
from protocol.transport.libp2p.client import P2pdClient
from protocol.transport.nat import CIRCUIT_MARKER
from protocol.transport.tls.resolver import Resolver

RESOLVE_SECONDS = 5.0
MAX_ROUTES = 8


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

"""Ask the machine of a peer that does not answer whether the peer's process has ended.

A machine that runs refuses connections to a port at which nobody listens any more. One that is off, asleep or behind a
cut says nothing, and neither does a process that is merely slow. So a refusal shows that the peer is on no side of a
split network: the others need not wait for it. Only endpoints at which the peer proved its key are asked, and the other
ports of the same hosts.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence

from protocol.transport.dial_policy import Endpoint, endpoint_of, parse_ip
from protocol.transport.nat import CIRCUIT_MARKER
from protocol.transport.tls.listener import DirectEndpoint

CONNECT_SECONDS = 2.0
TCP = "tcp"


def endpoints_to_ask(
    routes: Iterable[str], direct: DirectEndpoint | None, has_proved: Callable[[Endpoint], bool]
) -> list[Endpoint]:
    """Return all endpoints of a peer on the hosts where it proved its key.

    Args:
        routes: its multiaddresses.
        direct: where it takes direct connections.
        has_proved: tells whether it proved its key at an endpoint.
    """
    own = [route for route in routes if CIRCUIT_MARKER not in route and route.split("/")[3:4] == [TCP]]
    found = [endpoint for route in own if (endpoint := endpoint_of(route)) is not None]
    found += [Endpoint(host, direct.port) for host in direct.hosts] if direct is not None else []
    hosts = {endpoint.host for endpoint in found if parse_ip(endpoint.host) is not None and has_proved(endpoint)}
    return [endpoint for endpoint in dict.fromkeys(found) if endpoint.host in hosts]


async def refuse_all(endpoints: Sequence[Endpoint]) -> bool:
    """Return whether each of these endpoints refuses connections; False if there is none."""
    return bool(endpoints) and all(await _ask_all(endpoints))


async def _ask_all(endpoints: Collection[Endpoint]) -> list[bool]:
    return await asyncio.gather(*map(_refuses, endpoints))


async def _refuses(endpoint: Endpoint) -> bool:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return False

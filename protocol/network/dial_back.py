"""Whether a peer can be reached from here: knock at the ports that it names, at the host that its call comes from.

Nobody can have others knocked at by this. The host is not the caller's to say but what its connection shows; a caller
behind a relay is not tried. What is told is only whether a libp2p peer greets there, so that nothing is learnt of
other services, and each caller is served once a minute, all callers together a few times.
"""

import asyncio
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from protocol.errors import LimitError, MalformedError
from protocol.identity import PeerId
from protocol.membership.allowance import Allowance, SharedAllowance
from protocol.murmur_pb2 import DialBackReply
from protocol.network.reach import RELAYED

logger = logging.getLogger(__name__)

MAX_PORTS = 2
KNOCK_SECONDS = 5.0
PERIOD = 60.0  # seconds between two calls of one peer
MOST_A_PERIOD = 20  # calls of all peers together
GREETING = b"\x13/multistream/1.0.0\n"  # what a libp2p listener says first
Seen = Callable[[PeerId], Awaitable[Sequence[str]]]
Knock = Callable[[str, int], Awaitable[bool]]


async def greets(host: str, port: int) -> bool:
    """Whether a libp2p peer listens there; says nothing itself."""
    writer: asyncio.StreamWriter | None = None
    with suppress(OSError, EOFError, TimeoutError):
        async with asyncio.timeout(KNOCK_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            said = await reader.readexactly(len(GREETING))
        writer.transport.abort()
        return said == GREETING
    if writer is not None:
        writer.transport.abort()
    return False


def host_of(addresses: Sequence[str]) -> tuple[str, str] | None:
    """The first address that no relay stands behind, and the host in it."""
    for address in addresses:
        _, _, rest = address.partition("/")
        kind, _, tail = rest.partition("/")
        if kind in ("ip4", "ip6") and RELAYED not in address:
            host = tail.partition("/")[0]
            with suppress(ValueError):
                return address, str(ipaddress.ip_address(host))
    return None


class DialBack:
    """`seen`: the far ends of the connections with a peer."""

    def __init__(self, seen: Seen, knock: Knock = greets) -> None:
        self._seen = seen
        self._knock = knock
        together = Allowance(MOST_A_PERIOD, MOST_A_PERIOD / PERIOD)
        self._allowance = SharedAllowance(Allowance(1, 1 / PERIOD), together)

    async def answer(self, peer: PeerId, ports: Sequence[int], now: float) -> DialBackReply:
        """`now` in seconds, monotonic. Raises MalformedError and LimitError."""
        if len(ports) > MAX_PORTS or not all(0 < port < 65536 for port in ports):
            raise MalformedError(f"{peer} names {len(ports)} ports, or one that is none; at most {MAX_PORTS}")
        if lack := self._allowance.take(peer, now):
            much = f"more than once in {PERIOD:.0f} s" if lack == "caller" else "while too many others do"
            raise LimitError(f"{peer} asks to be dialled back {much}; try again later")
        found = host_of(await self._seen(peer))
        if found is None:
            return DialBackReply()
        address, host = found
        answers = await asyncio.gather(*(self._knock(host, port) for port in ports))
        logger.info("dialled %s back at %s: %d of %d ports answer", peer, host, sum(answers), len(ports))
        return DialBackReply(seen=address, open=[port for port, heard in zip(ports, answers, strict=True) if heard])

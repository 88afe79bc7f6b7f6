"""Requests to p2pd over its control socket: identify, connect, disconnect, open streams, accept streams.

The messages are hivemind's `p2pd_pb2`, each preceded by its length as a varint. hivemind's own client has no deadlines,
and a cancelled request leaves its socket half open for ever; here each request has a deadline and closes its socket.
"""

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import base58
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from protocol.errors import MalformedError, TransportError, UnreachableError
from protocol.identity import PeerId, public_key

BUFFER_BYTES = 256 * 1024  # a reader holds at most twice this
REPLY_SECONDS = 10.0  # p2pd answers requests that need no network at once
MAX_ERROR_CHARACTERS = 300
OWN_ADDRESS_ERROR = "dial to self attempted"  # omitted next to other errors: peers behind routers often share addresses
KNOWN_ERRORS: Final = MappingProxyType(
    {"dial backoff": "nothing answered there a moment ago", OWN_ADDRESS_ERROR: "its address is one of ours"}
)
MAX_ADDRESS_LENGTH = 512
P2P_CODE = b"\xa5\x03"  # multicodec of the /p2p/ part of a multiaddress
HOST_PROTOCOLS = ("ip4", "ip6", "dns", "dns4", "dns6")


class Stream(NamedTuple):
    """A bidirectional byte stream."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class P2pdClient:
    """Client of the p2pd at a Unix socket.

    Raises TransportError if p2pd does not answer, and UnreachableError if it refuses.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    async def identify(self) -> tuple[PeerId, tuple[str, ...]]:
        """Return our peer id and our addresses, without /p2p/."""
        answer = await self._request(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY), REPLY_SECONDS)
        addresses = tuple(str(Multiaddr(address)) for address in answer.identify.addrs)
        return base58.b58encode(answer.identify.id).decode(), addresses

    async def connect(self, peer: PeerId, addresses: Sequence[str], timeout: float) -> None:
        """Connect to a peer within `timeout` seconds.

        Returns at once if a connection exists.
        """
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.CONNECT,
            connect=p2pd_pb2.ConnectRequest(
                peer=base58.b58decode(peer),
                addrs=list(map(_encode_address, addresses)),
                timeout=math.ceil(timeout),
            ),
        )
        await self._request(request, timeout)

    async def disconnect(self, peer: PeerId) -> None:
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.DISCONNECT,
            disconnect=p2pd_pb2.DisconnectRequest(peer=base58.b58decode(peer)),
        )
        await self._request(request, REPLY_SECONDS)

    async def remote_addresses(self, peer: PeerId) -> tuple[str, ...]:
        """Return the remote ends of our present connections with a peer."""
        answer = await self._request(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), REPLY_SECONDS)
        raw_id = base58.b58decode(peer)
        return tuple(str(Multiaddr(raw)) for found in answer.peers if found.id == raw_id for raw in found.addrs)

    async def register_stream_handler(self, protocol: str, listener: Path) -> None:
        """Ask p2pd to connect to `listener` for each incoming stream.

        See `read_stream_peer`.
        """
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_HANDLER,
            streamHandler=p2pd_pb2.StreamHandlerRequest(
                addr=Multiaddr(f"/unix{listener}").to_bytes(), proto=[protocol], balanced=False
            ),
        )
        await self._request(request, REPLY_SECONDS)

    async def open_stream(self, peer: PeerId, protocol: str, timeout: float) -> Stream:
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(
                peer=base58.b58decode(peer), proto=[protocol], timeout=math.ceil(timeout)
            ),
        )
        stream, _ = await self._connect_and_request(request, timeout)
        return stream

    async def _request(self, request: Any, timeout: float) -> Any:
        stream, answer = await self._connect_and_request(request, timeout)
        stream.writer.transport.abort()
        return answer

    async def _connect_and_request(self, request: Any, timeout: float) -> tuple[Stream, Any]:
        """Return the answer and its open socket; on failure close the socket."""
        answer = p2pd_pb2.Response()
        stream: Stream | None = None
        try:
            async with asyncio.timeout(timeout):
                stream = Stream(*await asyncio.open_unix_connection(str(self._path), limit=BUFFER_BYTES))
                await write_pbmsg(stream.writer, request)
                await read_pbmsg_safe(stream.reader, answer)
            if answer.type == p2pd_pb2.Response.ERROR:
                raise UnreachableError(summarize_error(answer.error.msg))
        except BaseException as error:
            if stream:
                stream.writer.transport.abort()
            if isinstance(error, TimeoutError):
                raise UnreachableError(f"no answer within {timeout:g} s") from error
            if isinstance(error, OSError | EOFError):
                raise TransportError("p2pd does not answer; it is being restarted") from error
            raise
        return stream, answer


async def read_stream_peer(stream: Stream) -> PeerId:
    """Read the peer that opened a stream from p2pd.

    Raises MalformedError if it has no Ed25519 key.
    """
    information = p2pd_pb2.StreamInfo()
    async with asyncio.timeout(REPLY_SECONDS):
        await read_pbmsg_safe(stream.reader, information)
    peer = base58.b58encode(information.peer).decode()
    public_key(peer)
    return peer


def summarize_error(message: str) -> str:
    """Summarize p2pd's error on one line.

    Failed dials are reduced to their distinct reasons.
    """
    line = " ".join(message.split())
    if "all dials failed" not in line:
        return line[:MAX_ERROR_CHARACTERS]
    reasons = dict.fromkeys(entry.rpartition(": ")[2].split(" * ")[0].strip() for entry in line.split("] ")[1:])
    reasons.pop("", None)
    known = [KNOWN_ERRORS.get(reason, reason) for reason in reasons if reason != OWN_ADDRESS_ERROR or len(reasons) == 1]
    return (", ".join(known) or line)[:MAX_ERROR_CHARACTERS]


def _encode_address(address: str) -> bytes:
    """Encode an address for p2pd.

    hivemind encodes a peer id in the middle of an address as a CID, which p2pd's Go cannot read.
    """
    route, *relays = address.split("/p2p/")
    encoded: bytes = Multiaddr(route).to_bytes()
    for relay in relays:
        peer, _, rest = relay.partition("/")
        identity = base58.b58decode(peer)
        encoded += P2P_CODE + bytes([len(identity)]) + identity
        encoded += Multiaddr(f"/{rest}").to_bytes() if rest else b""
    return encoded


def split_address(address: str) -> tuple[PeerId, str]:
    """Split a multiaddress that ends in /p2p/<peer id> into peer id and route.

    Raises:
        MalformedError: The address is invalid, or p2pd could not encode it.
    """
    route, separator, peer = address.rpartition("/p2p/")
    if not separator or len(address) > MAX_ADDRESS_LENGTH:
        raise MalformedError(f"{address[:100]!r} is not a peer's address: it must end in /p2p/<peer id>")
    public_key(peer)
    with suppress(ValueError, LookupError):
        if Multiaddr(route).protocols()[0].name in HOST_PROTOCOLS and _encode_address(route):
            return peer, route
    raise MalformedError(f"{address[:100]!r} does not begin with a host and port, like /ip4/192.0.2.1/tcp/4001")

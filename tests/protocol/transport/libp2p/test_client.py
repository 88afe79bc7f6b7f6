"""Requests to p2pd: their deadlines, the sockets they leave open, and addresses."""

import asyncio
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.errors import MalformedError, TransportError, UnreachableError
from protocol.identity import Identity
from protocol.transport.p2pd import P2pdClient, split_address, summarize_error

pytestmark = pytest.mark.slow

PEER = Identity(Ed25519PrivateKey.from_private_bytes(bytes(32))).peer_id  # the same in every process that runs tests


@pytest.mark.parametrize("route", ["/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/9", "/dns4/example.org/tcp/4001"])
def test_address_splits_into_peer_id_and_route(route: str) -> None:
    assert split_address(f"{route}/p2p/{PEER}") == (PEER, route)


def test_relayed_address_splits_at_its_last_peer() -> None:
    route = f"/ip4/192.0.2.1/tcp/4001/p2p/{Identity.create().peer_id}/p2p-circuit"
    assert split_address(f"{route}/p2p/{PEER}") == (PEER, route)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "nonsense",
        "/ip4/127.0.0.1/tcp/1",
        f"/p2p/{PEER}",
        f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}x",
        f"/ip4/127.0.0.1/tcp/99999/p2p/{PEER}",
        f"/ip4/300.0.0.1/tcp/1/p2p/{PEER}",
        f"/ip4/127.0.0.1/nonsense/1/p2p/{PEER}",
        f"/unix/tmp/a.sock/p2p/{PEER}",
        f"/ip4/192.0.2.1/tcp/1/unix/x/p2p/0OIl/p2p/{PEER}",  # libraries read a path there, p2pd a peer
        f"/ip4/192.0.2.1/tcp/1/p2p/0OIl/p2p-circuit/p2p/{PEER}",
        f"/dns4/{'a' * 600}/tcp/1/p2p/{PEER}",
    ],
)
def test_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(MalformedError):
        split_address(address)


async def test_request_fails_without_p2pd(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="p2pd does not answer"):
        await P2pdClient(tmp_path / "none.sock").identify()


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_cancelled_request_leaves_no_open_file(tmp_path: Path) -> None:
    connections: list[asyncio.StreamWriter] = []
    path = tmp_path / "silent.sock"
    silent = await asyncio.start_unix_server(lambda reader, writer: connections.append(writer), path)
    before = _open_files()
    with pytest.raises(UnreachableError, match=r"no answer within 0.1 s"):
        await P2pdClient(path).open_stream(PEER, "/x", timeout=0.1)
    given_up = asyncio.create_task(P2pdClient(path).connect(PEER, ("/ip4/127.0.0.1/tcp/1",), timeout=60))
    while len(connections) < 2:
        await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait({given_up})
    for writer in connections:
        writer.transport.abort()
    await asyncio.sleep(0)
    assert _open_files() == before
    silent.close()


def test_error_of_failed_dials_is_shortened_to_the_reasons() -> None:
    one = "failed to dial: all dials failed * [/ip4/127.0.0.1/tcp/1] dial tcp4 127.0.0.1:1: connect: "
    more = " * [/ip4/192.0.2.1/tcp/4] dial tcp4 192.0.2.1:4: i/o timeout * [/ip4/192.0.2.1/tcp/5] dial backoff"
    assert summarize_error(f"{one}connection refused") == "connection refused"
    expected = "connection refused, i/o timeout, nothing answered there a moment ago"
    assert summarize_error(f"{one}connection refused{more}") == expected
    ours = " * [/ip4/192.168.0.2/tcp/4001] dial to self attempted"
    assert summarize_error(f"{one}connection refused{ours}{more}") == expected
    assert summarize_error(f"failed to dial: all dials failed{ours}") == "its address is one of ours"
    assert summarize_error("protocols not\n  supported") == "protocols not supported"
    assert summarize_error("all dials failed") == "all dials failed" and len(summarize_error("x" * 999)) == 300

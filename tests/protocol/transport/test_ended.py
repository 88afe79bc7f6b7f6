"""A peer whose machine refuses connections where it listened before has ended; one that is silent may live."""

import asyncio

import pytest

from protocol.transport import ended
from protocol.transport.dial_policy import DialPolicy, Endpoint
from protocol.transport.ended import endpoints_to_ask, refuse_all
from protocol.transport.tls.listener import DirectEndpoint

PEER, OTHER = "peer", "other"
HOST = "45.0.0.7"
ROUTES = (
    f"/ip4/{HOST}/tcp/4001",
    "/ip4/127.0.0.1/tcp/4001",
    f"/ip4/{HOST}/udp/4001/quic",
    "/dns4/example.org/tcp/4001",
)
CIRCUIT = "/ip4/45.0.0.9/tcp/4001/p2p/relay/p2p-circuit"


def policy_with_proof() -> DialPolicy:
    policy = DialPolicy(())
    policy.record_proof(PEER, Endpoint(HOST, 4001), 0.0)
    return policy


def asked(policy: DialPolicy, peer: str) -> list[Endpoint]:
    direct = DirectEndpoint((HOST, "127.0.0.1"), 4002)
    return endpoints_to_ask([*ROUTES, CIRCUIT], direct, lambda endpoint: policy.has_proved(peer, endpoint))


def test_only_hosts_at_which_the_peer_proved_its_key_are_asked() -> None:
    """Nobody can make others knock at a machine that is not its own."""
    policy = policy_with_proof()
    assert asked(policy, PEER) == [Endpoint(HOST, 4001), Endpoint(HOST, 4002)]
    assert not asked(policy, OTHER)


def test_a_place_where_it_was_found_before_is_its_own_until_another_is_found_there() -> None:
    policy = policy_with_proof()
    for now in (1.0, 2.0, 30.0):
        policy.record_failure(PEER, Endpoint(HOST, 4001), now)
        assert asked(policy, PEER)
    policy.record_proof(OTHER, Endpoint(HOST, 4001), 100.0)
    assert not asked(policy, PEER)


async def test_a_closed_port_refuses_and_an_open_one_does_not() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    other = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    endpoints = [Endpoint("127.0.0.1", port), Endpoint("127.0.0.1", other.sockets[0].getsockname()[1])]
    assert not await refuse_all(endpoints)
    server.close()
    await server.wait_closed()
    assert not await refuse_all(endpoints), "one of its two listens"
    other.close()
    await other.wait_closed()
    assert await refuse_all(endpoints)
    assert not await refuse_all([]), "nothing is known"


async def test_a_machine_that_is_silent_does_not_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(host: str, port: int) -> None:
        await asyncio.sleep(60.0)

    monkeypatch.setattr(ended, "CONNECT_SECONDS", 0.05)
    monkeypatch.setattr(asyncio, "open_connection", silent)
    assert not await refuse_all([Endpoint(HOST, 4001)])

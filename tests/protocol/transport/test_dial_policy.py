"""The policy of dials: which addresses of others, and how often."""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pytest

from protocol.errors import UnreachableError
from protocol.identity import Identity
from protocol.transport.dial_policy import (
    HOST_FAILURES,
    DialPolicy,
    Endpoint,
    GuardedDials,
    Resolver,
    endpoint_of,
    parse_ip,
)

PEER, OTHER, RELAY = (Identity.create().peer_id for _ in range(3))
HOME = ("/ip4/127.0.0.1/tcp/4001", "/ip4/192.168.1.5/tcp/4001")
LAB = ("/ip4/127.0.0.1/tcp/4001",)
PUBLIC_CONTACT = f"/ip4/45.0.0.1/tcp/4001/p2p/{OTHER}"


def policy_at(own: Sequence[str] = HOME, contacts: Sequence[str] = (PUBLIC_CONTACT,)) -> DialPolicy:
    policy = DialPolicy(contacts)
    policy.set_own_addresses(own)
    return policy


def admits(policy: DialPolicy, host: str, now: float = 0.0) -> bool:
    return policy.admits(PEER, Endpoint(host, 4001), now)


@pytest.mark.parametrize("host", ["45.0.0.9", "8.8.8.8", "2a00:1450::1", "192.168.1.77"])
def test_public_and_neighbouring_addresses_are_dialled(host: str) -> None:
    assert admits(policy_at(), host)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.8.8.8", "::1", "10.0.0.5", "192.168.2.1", "172.16.0.1", "169.254.169.254", "100.64.0.1",
        "0.0.0.0", "255.255.255.255", "224.0.0.1", "240.0.0.1", "fe80::1", "fc00::1", "ff02::1", "::",
        "::ffff:127.0.0.1", "::ffff:10.0.0.5", "::ffff:169.254.169.254", "192.0.2.1", "198.18.0.1", "203.0.113.7",
        "2001:db8::1", "localhost", "metadata.internal", "0x7f.1", "2130706433", "127.1", "0177.0.0.1", "",
    ],
)  # fmt: skip
def test_addresses_of_this_machine_and_of_private_networks_are_not_dialled(host: str) -> None:
    assert not admits(policy_at(), host)


def test_lab_is_known_by_our_own_addresses_or_by_those_of_the_contacts() -> None:
    assert admits(policy_at(own=LAB, contacts=()), "127.0.0.1")
    assert admits(policy_at(contacts=(f"/ip4/127.0.0.1/tcp/9/p2p/{OTHER}",)), "127.0.0.1")
    private = policy_at(contacts=(f"/ip4/10.1.0.1/tcp/9/p2p/{OTHER}",))
    assert admits(private, "10.200.3.4") and not admits(private, "172.16.0.1") and not admits(private, "127.0.0.1")


def test_contact_is_dialled_wherever_it_is_and_as_often_as_wanted() -> None:
    contact = Endpoint("files.internal", 4001)
    policy = policy_at(contacts=(f"/dns4/files.internal/tcp/4001/p2p/{OTHER}",))
    for _ in range(100):
        assert policy.admits(OTHER, contact, 0.0)
        policy.record_failure(OTHER, contact, 0.0)


def test_failed_endpoint_is_tried_after_growing_waits() -> None:
    policy, victim, tries = policy_at(), Endpoint("45.0.0.9", 22), []
    for now in range(200):
        if policy.admits(PEER, victim, float(now)):
            tries.append(now)
            policy.record_failure(PEER, victim, float(now))
    assert tries == [0, 10, 30, 70, 150]


def test_peer_is_tried_every_20_seconds_where_it_was_found_before() -> None:
    """Otherwise a node whose network was down for an hour would wait up to an hour for its peers."""
    for owner, longest in ((PEER, 20), (OTHER, 3600)):
        policy, endpoint, tries = policy_at(), Endpoint("45.0.0.9", 4001), []
        policy.record_proof(owner, endpoint, 0.0)
        for now in range(100, 20_000):
            if policy.admits(PEER, endpoint, float(now)):
                tries.append(now)
                policy.record_failure(PEER, endpoint, float(now))
        assert max(later - earlier for earlier, later in itertools.pairwise(tries)) == longest, tries


def test_endpoint_of_a_proved_peer_is_dialled_for_it_alone() -> None:
    policy, endpoint = policy_at(), Endpoint("45.0.0.9", 4001)
    policy.record_proof(PEER, endpoint, 0.0)
    assert policy.admits(PEER, endpoint, 1.0) and not policy.admits(OTHER, endpoint, 1.0)
    assert policy.admits(OTHER, endpoint, 100.0)  # addresses change hands
    policy.record_failure(PEER, endpoint, 2.0)  # it has moved
    assert policy.admits(OTHER, endpoint, 3.0)


def test_knocking_at_many_ports_of_a_third_party_is_limited() -> None:
    """Attack 14: six records made three peers knock 108 times in 12 seconds."""
    policy = policy_at()
    knocks = Counter[str]()
    for now, port in itertools.product(range(12), range(1, 1000)):
        endpoint = Endpoint("45.0.0.9", port)
        if policy.admits(PEER, endpoint, float(now)):
            knocks["with the policy"] += 1
            policy.record_failure(PEER, endpoint, float(now))
        knocks["control"] += 1
    assert knocks["with the policy"] <= HOST_FAILURES + 2 < knocks["control"] / 100


def test_endpoint_of_a_route() -> None:
    assert endpoint_of("/ip4/45.0.0.9/tcp/4001") == Endpoint("45.0.0.9", 4001)
    assert endpoint_of(f"/ip4/45.0.0.9/tcp/1/p2p/{RELAY}/p2p-circuit") == Endpoint("45.0.0.9", 1)
    assert endpoint_of("/ip6/2a00::1/udp/1/quic-v1") == Endpoint("2a00::1", 1)
    for route in ("", "/", "/dnsaddr/x.org", "/unix/tmp/x", "/ip4/1.2.3.4", "/ip4/1.2.3.4/tcp/x", "/memory/1"):
        assert endpoint_of(route) is None
    assert str(parse_ip("::ffff:1.2.3.4")) == "1.2.3.4" and parse_ip("x.org") is None


class FakeClient:
    """In the place of p2pd's client."""

    def __init__(self, is_reachable: bool = True) -> None:
        self.is_reachable = is_reachable
        self.dialled: list[tuple[str, ...]] = []
        self.remote: tuple[str, ...] = ()

    async def connect(self, peer: str, routes: tuple[str, ...], timeout: float) -> None:
        self.dialled.append(routes)
        if not self.is_reachable:
            raise UnreachableError("nobody there")
        self.remote = routes[:1]

    async def remote_addresses(self, peer: str) -> tuple[str, ...]:
        return self.remote


def dials_with(policy: DialPolicy, *addresses: str) -> GuardedDials:
    def look_up(host: str, port: int, type: int) -> list[Any]:  # noqa: A002
        return [(0, 0, 0, "", (address, port)) for address in addresses]

    return GuardedDials(policy, Resolver(look_up), Counter())


async def test_name_is_resolved_and_its_addresses_are_judged() -> None:
    routes = ["/dns4/evil.example/tcp/4001", "/dnsaddr/evil.example", "/ip4/45.0.0.7/tcp/1"]
    rebound = dials_with(policy_at(), "127.0.0.1", "169.254.169.254", "::1", "10.0.0.1")
    assert await rebound.choose(PEER, routes) == ["/ip4/45.0.0.7/tcp/1"]
    honest = dials_with(policy_at(), "45.0.0.8")
    assert await honest.choose(PEER, routes) == ["/ip4/45.0.0.7/tcp/1", "/ip4/45.0.0.8/tcp/4001"]
    many = [f"/dns4/{number}.example/tcp/4001" for number in range(8)]
    assert len(await honest.choose(PEER, many)) <= 2


async def test_only_admitted_routes_reach_p2pd_and_the_outcome_is_remembered() -> None:
    dials, client = dials_with(policy_at()), FakeClient(is_reachable=False)
    routes = ["/ip4/10.0.0.1/tcp/22", "/ip4/45.0.0.9/tcp/4001", f"/ip4/45.0.0.2/tcp/1/p2p/{RELAY}/p2p-circuit"]
    for _ in range(3):
        with pytest.raises(UnreachableError):
            await dials.connect(cast(Any, client), PEER, routes, 1.0)
    assert client.dialled[0] == tuple(routes[1:]) and set(client.dialled[1:]) == {tuple(routes[2:])}
    client.is_reachable = True
    await dials.connect(cast(Any, client), PEER, routes, 1.0)
    await dials.connect(cast(Any, client), PEER, routes, 1.0)
    assert len(client.dialled) == 4  # it is connected
    with pytest.raises(UnreachableError, match="may be dialled"):
        await dials.connect(cast(Any, FakeClient()), OTHER, routes[:1], 1.0)

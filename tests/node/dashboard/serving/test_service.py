"""The dashboard's address and the manifest that it serves."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx2
import pytest

from node.dashboard.observer_node import NodeHandle
from node.dashboard.service import (
    MAX_BOOTSTRAP_ADDRESSES,
    DashboardAddress,
    ManifestPublisher,
    serve_dashboard,
    sort_reachable_first,
)
from node.dashboard.swarm_watcher import SwarmWatcher, run_facts
from node.run_dir import RunDir
from protocol.errors import StorageError, TransportError, UsageError
from protocol.signing import open_signed_manifest
from protocol.steering import RevisionLog
from tests.node.small_run import MANIFEST, PEERS, admitted_of

ME, *OTHERS = (identity.peer_id for identity in PEERS)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:8080", "127.0.0.1", 8080),
        ("0.0.0.0:80", "0.0.0.0", 80),
        (":9", "127.0.0.1", 9),
        ("8081", "127.0.0.1", 8081),
        ("[::1]:7", "::1", 7),
        ("run.example.org:443", "run.example.org", 443),
    ],
)
def test_http_address_is_parsed(address: str, host: str, port: int) -> None:
    assert DashboardAddress.parse(address, None) == DashboardAddress(host, port)


@pytest.mark.parametrize("address", ["", "here", "1.2.3.4:x", "1.2.3.4:99999", "a b:1", "http://x:1"])
def test_invalid_http_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="--http"):
        DashboardAddress.parse(address, None)


def test_public_url_is_checked() -> None:
    assert DashboardAddress.parse("8080", "https://run.example.org/").public_url == "https://run.example.org"
    with pytest.raises(UsageError, match="--public-url"):
        DashboardAddress.parse("8080", "run.example.org")


@dataclass
class FakeTransport:
    own: tuple[str, ...]
    broken: bool = False
    asked: int = field(default=0)

    async def addresses(self) -> tuple[str, ...]:
        self.asked += 1
        if self.broken:
            raise TransportError("p2pd is restarting")
        return self.own


def make_publisher(transport: FakeTransport, known_addresses: dict[str, tuple[str, ...]]) -> ManifestPublisher:
    directory = SimpleNamespace(known_addresses=lambda: known_addresses)
    handle = SimpleNamespace(
        manifest=MANIFEST, identity=PEERS[0], transport=transport, directory=directory, trust_point=None
    )
    return ManifestPublisher(handle, None)  # type: ignore[arg-type]


async def test_manifest_names_the_host_first_and_some_peers() -> None:
    loopback, public = f"/ip4/127.0.0.1/tcp/1/p2p/{ME}", f"/ip4/192.0.2.1/tcp/1/p2p/{ME}"
    known = {peer: (f"/ip4/127.0.0.1/tcp/2/p2p/{peer}", f"/ip4/192.0.2.2/tcp/2/p2p/{peer}") for peer in OTHERS}
    transport = FakeTransport((loopback, public))
    publisher = make_publisher(
        transport, known | {f"{number}": (f"/ip4/192.0.2.9/tcp/{number}/p2p/{OTHERS[0]}",) for number in range(1, 20)}
    )
    signed = open_signed_manifest(await publisher.signed_text(), "here")
    assert signed.organiser == ME and signed.manifest.run_id == MANIFEST.run_id
    named = signed.manifest.run.bootstrap
    assert named[:2] == (public, loopback) and len(named) == MAX_BOOTSTRAP_ADDRESSES
    assert named[2] == f"/ip4/192.0.2.2/tcp/2/p2p/{OTHERS[0]}"
    assert await publisher.signed_text() == await publisher.signed_text() and transport.asked == 1


async def test_host_without_network_still_serves_the_manifest() -> None:
    transport = FakeTransport((), broken=True)
    signed = open_signed_manifest(await make_publisher(transport, {}).signed_text(), "here")
    assert signed.manifest == MANIFEST


def test_addresses_that_most_others_reach_come_first() -> None:
    sorted_well = [
        "/dns/run.example.org/tcp/1/p2p/x",
        "/ip4/8.8.8.8/tcp/1",
        "/ip6/2606:4700::1/tcp/1",
        "/ip4/192.168.1.2/tcp/1",
        "/ip6/fd00::2/tcp/1",
        "/ip4/127.0.0.1/tcp/1",
        "/ip6/::1/tcp/1",
    ]
    found = sort_reachable_first(sorted_well[::-1])
    assert found[:5] == sorted_well[:5] and set(found[5:]) == set(sorted_well[5:])


def test_facts_follow_from_the_manifest() -> None:
    facts = run_facts(MANIFEST, ME)
    assert (facts.run, facts.run_id, facts.organiser) == (MANIFEST.run.name, MANIFEST.run_id, ME)
    assert facts.parameters > 0


@dataclass
class FakeNodeHandle:
    """The handle of a node in a run without other peers."""

    is_trainer: bool
    own_chain = None
    has_model = False
    revisions = RevisionLog()
    manifest = MANIFEST
    identity = PEERS[0]
    base = Path()
    peer_id = ME
    directory = SimpleNamespace(live=dict, subscribe=lambda _: None)
    admitted = admitted_of(directory)

    def channel(self, _: str) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "trains", "line", "traceback"),
    [
        (StorageError("cannot write it; free some space"), False, "no longer updated: cannot write it; free", False),
        (
            StorageError("cannot write it; free some space"),
            True,
            "no longer updated; training continues: cannot",
            False,
        ),
        (ValueError("a fault"), False, "no longer updated", True),
        (ValueError("a fault"), True, "no longer updated; training continues", True),
    ],
)
async def test_failed_watcher_is_logged_and_the_page_is_unhealthy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    error: Exception, trains: bool, line: str, traceback: bool,
) -> None:  # fmt: skip
    full = asyncio.Event()

    async def run(_: SwarmWatcher) -> None:
        await full.wait()
        raise error

    monkeypatch.setattr(SwarmWatcher, "run", run)
    handle = cast(NodeHandle, FakeNodeHandle(trains))
    async with (
        serve_dashboard(handle, RunDir(tmp_path), DashboardAddress("127.0.0.1", 0)) as dashboard,
        httpx2.AsyncClient(timeout=10) as client,
    ):
        assert (await client.get(f"{dashboard.page_url}healthz")).status_code == 200
        full.set()
        await asyncio.wait({dashboard.watcher_task})
        assert (await client.get(f"{dashboard.page_url}healthz")).status_code == 503
    (record,) = [record for record in caplog.records if "the watcher has failed" in record.message]
    assert line in record.message and bool(record.exc_info) == traceback
    assert ("training continues" in record.message) == trains

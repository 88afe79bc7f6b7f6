"""The door of a host, and the manifest that it hands out."""

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
    run_facts,
    serve_dashboard,
    sort_reachable_first,
)
from node.dashboard.swarm_watcher import SwarmWatcher
from node.run_dir import RunDir
from protocol.errors import StorageError, TransportError, UsageError
from protocol.signing import open_signed_manifest
from tests.node.small_run import MANIFEST, PEERS

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
def test_where_the_page_is_served(address: str, host: str, port: int) -> None:
    assert DashboardAddress.parse(address, None) == DashboardAddress(host, port)


@pytest.mark.parametrize("address", ["", "here", "1.2.3.4:x", "1.2.3.4:99999", "a b:1", "http://x:1"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(UsageError, match="--http"):
        DashboardAddress.parse(address, None)


def test_a_public_url_is_one() -> None:
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
            raise TransportError("p2pd is being started again")
        return self.own


def make_publisher(transport: FakeTransport, neighbours: dict[str, tuple[str, ...]]) -> ManifestPublisher:
    directory = SimpleNamespace(known_addresses=lambda: neighbours)
    window = SimpleNamespace(manifest=MANIFEST, identity=PEERS[0], transport=transport, directory=directory)
    return ManifestPublisher(window)  # type: ignore[arg-type]


async def test_the_manifest_names_the_host_first_and_some_peers() -> None:
    loopback, public = f"/ip4/127.0.0.1/tcp/1/p2p/{ME}", f"/ip4/192.0.2.1/tcp/1/p2p/{ME}"
    neighbours = {peer: (f"/ip4/127.0.0.1/tcp/2/p2p/{peer}", f"/ip4/192.0.2.2/tcp/2/p2p/{peer}") for peer in OTHERS}
    transport = FakeTransport((loopback, public))
    seal = make_publisher(
        transport, neighbours | {f"{number}": (f"/ip4/192.0.2.9/tcp/{number}",) for number in range(1, 20)}
    )
    signed = open_signed_manifest(await seal.signed_text(), "here")
    assert signed.organiser == ME and signed.manifest.run_id == MANIFEST.run_id
    named = signed.manifest.run.bootstrap
    assert named[:2] == (public, loopback) and len(named) == MAX_BOOTSTRAP_ADDRESSES
    assert named[2] == f"/ip4/192.0.2.2/tcp/2/p2p/{OTHERS[0]}"
    assert await seal.signed_text() == await seal.signed_text() and transport.asked == 1


async def test_a_host_whose_network_is_away_still_hands_out_the_run() -> None:
    transport = FakeTransport((), broken=True)
    signed = open_signed_manifest(await make_publisher(transport, {}).signed_text(), "here")
    assert signed.manifest == MANIFEST


def test_addresses_of_this_machine_alone_come_last() -> None:
    assert (
        sort_reachable_first(["/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1", "/ip4/192.0.2.1/tcp/1"])[0]
        == "/ip4/192.0.2.1/tcp/1"
    )


def test_the_facts_of_a_run() -> None:
    facts = run_facts(MANIFEST, ME)
    assert (facts.run, facts.run_id, facts.organiser) == (MANIFEST.run.name, MANIFEST.run_id, ME)
    assert facts.parameters > 0


@dataclass
class FakeNodeHandle:
    """Of a run that nobody takes part in."""

    is_trainer: bool
    manifest = MANIFEST
    identity = PEERS[0]
    peer_id = ME
    directory = SimpleNamespace(live=dict, subscribe=lambda _: None)

    def contribution_limits(self) -> None:
        pass

    def channel(self, _: str) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "trains", "line", "traceback"),
    [
        (StorageError("cannot write it; free some space"), False, "stands still: cannot write it; free", False),
        (StorageError("cannot write it; free some space"), True, "stands still; training goes on: cannot", False),
        (ValueError("a fault"), False, "stands still", True),
        (ValueError("a fault"), True, "stands still; training goes on", True),
    ],
)
async def test_a_watch_that_ends_says_so_and_the_page_is_not_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    error: Exception, trains: bool, line: str, traceback: bool,
) -> None:  # fmt: skip
    full = asyncio.Event()

    async def run(_: SwarmWatcher) -> None:
        await full.wait()
        raise error

    monkeypatch.setattr(SwarmWatcher, "run", run)
    window = cast(NodeHandle, FakeNodeHandle(trains))
    async with (
        serve_dashboard(window, RunDir(tmp_path), DashboardAddress("127.0.0.1", 0)) as shown,
        httpx2.AsyncClient(timeout=10) as client,
    ):
        assert (await client.get(f"{shown.page_url}healthz")).status_code == 200
        full.set()
        await asyncio.wait({shown.watcher_task})
        assert (await client.get(f"{shown.page_url}healthz")).status_code == 503
    (record,) = [record for record in caplog.records if "the watch has ended" in record.message]
    assert line in record.message and bool(record.exc_info) == traceback
    assert ("training goes on" in record.message) == trains

"""A host's own work, beside whatever node it looks through: the journal, the watch and the page.

What a host that asks for it announces to everybody: its run, how far it is, and the link to join by.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

from node.dashboard.event_log import EVENT_FILE_NAME, EventLog
from node.dashboard.events import LogOpened, RunFacts
from node.dashboard.observer_node import NodeHandle
from node.dashboard.server import DashboardData, build_app
from node.dashboard.state import RunState
from node.dashboard.swarm_watcher import SwarmWatcher
from node.model import shape_table
from node.monitoring.http_server import open_listener, serve
from node.run_dir import RunDir
from node.units import ALL_INTERFACES, parse_host_port
from protocol.errors import MurmurError, TransportError, UnreachableError, UsageError
from protocol.identity import PeerId
from protocol.manifest import Manifest
from protocol.membership.dht_storage import Announcement
from protocol.membership.run_registry import make_run_announcement
from protocol.murmur_pb2 import PublicRun
from protocol.signing import fingerprint, sign_manifest
from protocol.transport.nat import find_own_ip

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
MAX_BOOTSTRAP_ADDRESSES = 8  # addresses in the manifest that is served
MAX_OWN_ADDRESSES = 4  # of them ours
SIGNED_TEXT_SECONDS = 5.0  # that a signed text is served for
LOOPBACK_PREFIXES = ("/ip4/127.", "/ip6/::1/")


@dataclass(frozen=True)
class DashboardAddress:
    """Where the page is served, and how others reach it where that differs."""

    host: str
    port: int
    public_url: str | None = None

    @classmethod
    def parse(cls, address: str, public_url: str | None) -> "DashboardAddress":
        """`HOST:PORT`, `:PORT` or `PORT`. Raises UsageError."""
        host, port = parse_host_port(address, "--http")
        if public_url is not None and not re.match(r"^https?://[^\s/]+(/[^\s]*)?$", public_url):
            raise UsageError(f"--public-url: {public_url!r} is no URL; write it like https://run.example.org")
        return cls(host, port, public_url.rstrip("/") if public_url else None)

    @property
    def is_loopback_only(self) -> bool:
        return self.public_url is None and self.host in ("127.0.0.1", "localhost", "::1")

    def base_url(self, bound_port: int) -> str:
        """How others reach what is served at that port, without a slash at the end."""
        host = find_own_ip() if self.host in ALL_INTERFACES else self.host
        return self.public_url or f"http://{f'[{host}]' if ':' in host else host}:{bound_port}"


def run_facts(manifest: Manifest, organiser: PeerId) -> RunFacts:
    return RunFacts(
        run=manifest.run.name,
        run_id=manifest.run_id,
        recipe=manifest.method.recipe,
        parameters=shape_table(manifest.model).numel,
        batch_tokens=manifest.train.batch_tokens,
        min_peers=manifest.run.min_peers,
        target_rounds=manifest.target.rounds,
        target_tokens=manifest.target.tokens,
        organiser=organiser,
        expiry=manifest.membership.expiry,
    )


class ManifestPublisher:
    """The signed manifest, with addresses at which the run is found now."""

    def __init__(self, node: NodeHandle) -> None:
        self._node = node
        self._text = b""
        self._valid_until = 0.0

    async def signed_text(self) -> bytes:
        if time.monotonic() > self._valid_until:
            manifest = self._node.manifest
            run = manifest.run.model_copy(update={"bootstrap": await self._bootstrap_addresses()})
            self._text = sign_manifest(manifest.model_copy(update={"run": run}), self._node.identity)
            self._valid_until = time.monotonic() + SIGNED_TEXT_SECONDS
        return self._text

    async def _bootstrap_addresses(self) -> tuple[str, ...]:
        """Ours first, then what the manifest says, then one of each of some peers: any of them is enough to join."""
        try:
            own = await self._node.transport.addresses()
        except (TransportError, UnreachableError) as error:
            logger.warning("our own addresses cannot be read now: %s", error)
            own = ()
        neighbours = self._node.directory.known_addresses().values()
        others = [addresses[0] for addresses in map(sort_reachable_first, neighbours) if addresses]
        chosen = [*sort_reachable_first(own)[:MAX_OWN_ADDRESSES], *self._node.manifest.run.bootstrap, *others]
        return tuple(dict.fromkeys(chosen))[:MAX_BOOTSTRAP_ADDRESSES]


def sort_reachable_first(addresses: Sequence[str]) -> list[str]:
    """Those of this machine alone come last."""
    return sorted(addresses, key=lambda address: address.startswith(LOOPBACK_PREFIXES))


@dataclass(frozen=True)
class RunningDashboard:
    """`watch` ends only by a fault; `page` is its address."""

    watcher_task: asyncio.Task[None]
    event_log: EventLog
    page_url: str


@contextlib.asynccontextmanager
async def serve_dashboard(
    node: NodeHandle, run_dir: RunDir, address: DashboardAddress
) -> AsyncIterator[RunningDashboard]:
    """Watches and serves while inside."""
    facts = run_facts(node.manifest, node.peer_id)
    listener = open_listener(address.host, address.port, "--http")
    recorder = EventLog.open(run_dir.path / EVENT_FILE_NAME, LogOpened(at=time.time(), facts=facts))
    watch = asyncio.create_task(SwarmWatcher(node, recorder).run(), name="watch")
    watch.add_done_callback(partial(_log_watcher_end, is_trainer=node.is_trainer))
    face = DashboardData(
        recorder, ManifestPublisher(node).signed_text, address.public_url, is_live=lambda: not watch.done()
    )
    try:
        async with serve(build_app(face), listener, MAX_CONNECTIONS) as port:
            base = address.base_url(port)
            _print_join_info(facts, base, address.is_loopback_only)
            yield RunningDashboard(watch, recorder, f"{base}/")
    finally:
        watch.cancel()
        await asyncio.wait({watch})
        recorder.close()


def _print_join_info(facts: RunFacts, base_url: str, loopback_only: bool) -> None:
    print(f"page         {base_url}/", flush=True)
    print(f"to take part murmur join {base_url}/run.toml", flush=True)
    print(f"fingerprint  {fingerprint(facts.organiser)}", flush=True)
    if loopback_only:
        print("open to      this machine alone; --http 0.0.0.0:PORT opens it to others", flush=True)


def _log_watcher_end(task: asyncio.Task[None], is_trainer: bool) -> None:
    """What a person can mend is told in one line; the traceback is for what nobody has thought of."""
    if task.cancelled() or (error := task.exception()) is None:
        return
    goes_on = "; training goes on" if is_trainer else ""
    if isinstance(error, MurmurError):
        logger.error("the watch has ended, the page stands still%s: %s", goes_on, error)
    else:
        logger.error("the watch has ended, the page stands still%s", goes_on, exc_info=error)


async def build_announcement(node: NodeHandle, state: RunState, address: DashboardAddress, now: float) -> Announcement:
    """`now` in swarm time. Raises TransportError while our own addresses cannot be read."""
    manifest, last = node.manifest, state.rows.last
    run = PublicRun(
        run=bytes.fromhex(manifest.run_id),
        name=manifest.run.name,
        recipe=manifest.method.recipe,
        parameters=shape_table(manifest.model).numel,
        peers=len(state.trainers),
        round=last.round + 1 if last else 0,
        target_rounds=manifest.target.rounds or 0,
        tokens=last.tokens if last else 0,
        target_tokens=manifest.target.tokens or 0,
        link=join_link(manifest.run_id, sort_reachable_first(await node.transport.addresses()), address),
    )
    return make_run_announcement(node.identity, run, now)


def join_link(run_id: str, addresses: list[str], address: DashboardAddress) -> str:
    """The page where it has a public address; else the run by its id, at one of ours."""
    if address.public_url is not None or not addresses:
        return f"{address.public_url}/run.toml"
    return f"murmur://{run_id}@{addresses[0]}"

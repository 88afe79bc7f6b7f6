"""The dashboard service of a host: the event log, the watcher, the page, and the public announcement of the run."""

import asyncio
import contextlib
import ipaddress
import logging
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from node.daemon.receipts.commit_file import COMMIT_FILE_NAME
from node.daemon.receipts.commit_log import CommitLog, commit_file_header, receipt_name
from node.daemon.receipts.receipt import ReceiptIssuer
from node.daemon.stored_states.model_archive import FLOAT_BYTES, ModelArchive
from node.dashboard.chain_follower import shown_manifest
from node.dashboard.evaluations import EvaluationKeeper, EvaluationPlan
from node.dashboard.event_log import EVENT_FILE_NAME, EventLog
from node.dashboard.events import LogOpened
from node.dashboard.host_report import ReportWriter
from node.dashboard.json_views import run_status
from node.dashboard.observer_node import NodeHandle
from node.dashboard.samples.sampler import Sampler
from node.dashboard.server import DashboardData, build_app
from node.dashboard.state import RunState
from node.dashboard.swarm_watcher import SwarmWatcher, run_facts
from node.hub import HubUploader
from node.model import shape_table
from node.monitoring.http_server import open_listener, serve
from node.own_loops import join_line
from node.own_voucher import find_voucher
from node.run_dir import RunDir
from node.units import ALL_INTERFACES, parse_host_port
from protocol.errors import MurmurError, StorageError, TransportError, UnreachableError, UsageError
from protocol.manifest.run import Manifest
from protocol.membership.dht_storage import Announcement
from protocol.membership.rendezvous import make_run_announcement
from protocol.murmur_pb2 import PublicRun
from protocol.signing import Voucher, fingerprint, sign_manifest
from protocol.tasks import cancel_and_wait
from protocol.transport.nat import find_own_ip

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
MAX_BOOTSTRAP_ADDRESSES = 8  # in the served manifest
MAX_OWN_ADDRESSES = 4  # of these, addresses of this host
SIGNED_TEXT_SECONDS = 5.0  # how long a signed manifest is served before it is renewed


@dataclass(frozen=True)
class DashboardAddress:
    """The address that the page is served at, and the public URL if it differs."""

    host: str
    port: int
    public_url: str | None = None

    @classmethod
    def parse(cls, address: str, public_url: str | None) -> "DashboardAddress":
        """Parse `HOST:PORT`, `:PORT` or `PORT`. Raises UsageError."""
        host, port = parse_host_port(address, "--http")
        if public_url is not None and not re.match(r"^https?://[^\s/]+(/[^\s]*)?$", public_url):
            raise UsageError(f"--public-url: {public_url!r} is not a URL; write it like https://run.example.org")
        return cls(host, port, public_url.rstrip("/") if public_url else None)

    @property
    def is_loopback_only(self) -> bool:
        return self.public_url is None and self.host in ("127.0.0.1", "localhost", "::1")

    def base_url(self, bound_port: int) -> str:
        """Return the URL for other people, without a trailing slash; `bound_port` is the port that is served."""
        host = find_own_ip() if self.host in ALL_INTERFACES else self.host
        return self.public_url or f"http://{f'[{host}]' if ':' in host else host}:{bound_port}"


class ManifestPublisher:
    """Signs the manifest with the addresses at which the run can be joined now."""

    def __init__(self, node: NodeHandle, voucher: Voucher | None) -> None:
        self._node = node
        self._voucher = voucher
        self._text = b""
        self._valid_until = 0.0

    async def signed_text(self) -> bytes:
        """Return the signed manifest, renewed every SIGNED_TEXT_SECONDS."""
        if time.monotonic() > self._valid_until:
            manifest = self._node.manifest
            run = manifest.run.model_copy(update={"bootstrap": await self._bootstrap_addresses()})
            served = manifest.model_copy(update={"run": run})
            self._text = sign_manifest(served, self._node.identity, self._node.trust_point, self._voucher)
            self._valid_until = time.monotonic() + SIGNED_TEXT_SECONDS
        return self._text

    async def _bootstrap_addresses(self) -> tuple[str, ...]:
        """Return this host's addresses, then the manifest's, then one each of other peers; any one suffices to join."""
        try:
            own = await self._node.transport.addresses()
        except (TransportError, UnreachableError) as error:
            logger.warning("cannot read this node's own addresses: %s", error)
            own = ()
        known_addresses = self._node.directory.known_addresses().values()
        others = [addresses[0] for addresses in map(sort_reachable_first, known_addresses) if addresses]
        chosen = [*sort_reachable_first(own)[:MAX_OWN_ADDRESSES], *self._node.manifest.run.bootstrap, *others]
        return tuple(dict.fromkeys(chosen))[:MAX_BOOTSTRAP_ADDRESSES]


def sort_reachable_first(addresses: Sequence[str]) -> list[str]:
    """Sort multiaddresses by how many others reach them: names, public IPv4 and IPv6, private ones, loopback."""
    return sorted(addresses, key=_reach_rank)


def _reach_rank(address: str) -> int:
    try:
        ip = ipaddress.ip_address(address.split("/")[2].partition("%")[0])
    except (ValueError, IndexError):
        return 0  # a DNS name
    if ip.is_loopback:
        return 5
    return (1 if ip.is_global else 3) + (ip.version == 6)


@dataclass(frozen=True)
class RunningDashboard:
    """A dashboard that is being served; `watcher_task` ends only if the watcher fails.

    `voucher` is the organiser's for this host, None if it has none.
    """

    watcher_task: asyncio.Task[None]
    event_log: EventLog
    page_url: str
    sampler: Sampler
    voucher: Voucher | None = None


@contextlib.asynccontextmanager
async def serve_dashboard(
    node: NodeHandle,
    run_dir: RunDir,
    address: DashboardAddress,
    more_models: Sequence[Path] = (),
    evaluates: EvaluationPlan | None = None,
    hub: str = "",
) -> AsyncIterator[RunningDashboard]:
    """Watch the swarm and serve the page inside the context.

    Samples are of the newest model in this node's folder or in `more_models`, folders of other nodes on this machine.
    `hub` is the repository that gets the final model.
    """
    voucher = find_voucher(node.manifest, run_dir, node.peer_id)
    organiser = voucher.organiser if voucher else node.peer_id
    facts, shown = run_facts(node.manifest, organiser), shown_manifest(node.manifest)
    listener = open_listener(address.host, address.port, "--http")
    event_log = EventLog.open(run_dir.path / EVENT_FILE_NAME, LogOpened(at=time.time(), facts=facts))
    commit_log = CommitLog.open(run_dir.path / COMMIT_FILE_NAME, commit_file_header(shown))
    folders = (run_dir.path, *more_models)
    model = ModelArchive(folders, node.manifest, partial(is_final_round, event_log)) if node.has_model else None
    watcher = asyncio.create_task(SwarmWatcher(node, event_log, commit_log, model).run(), name="swarm watcher")
    watcher.add_done_callback(partial(_log_watcher_end, is_trainer=node.is_trainer))
    writes_text = node.has_model and not node.manifest.model.is_custom
    sampler = Sampler(folders if writes_text else (), node.base, event_log)
    sampling = asyncio.create_task(_sample_while_possible(sampler), name="sampler")
    data = DashboardData(
        event_log,
        ManifestPublisher(node, voucher).signed_text,
        address.public_url,
        manifest=node.manifest,
        is_live=lambda: not watcher.done(),
        model=model,
        receipts=ReceiptIssuer(
            commit_log, receipt_name(shown), node.identity, lambda peer: event_log.state.name_of(peer), voucher
        ),
    )
    evaluations = asyncio.create_task(_evaluate_while_possible(run_dir.path, event_log, evaluates), name="evaluations")
    report_writer = ReportWriter(run_dir.path, event_log)
    report_task = asyncio.create_task(report_writer.run(), name="report writer")
    uploading = asyncio.create_task(_upload_if_wanted(hub, folders, node.manifest, event_log), name="hub upload")
    try:
        async with serve(build_app(data), listener, MAX_CONNECTIONS) as port:
            yield RunningDashboard(watcher, event_log, f"{address.base_url(port)}/", sampler, voucher)
    finally:
        await cancel_and_wait((sampling, evaluations, watcher, report_task, uploading))
        report_writer.close()
        event_log.close()


async def _sample_while_possible(sampler: Sampler) -> None:
    """Sample until cancelled, or until the event log cannot be written, which the watcher reports."""
    with contextlib.suppress(StorageError):
        await sampler.run()


async def _evaluate_while_possible(folder: Path, event_log: EventLog, plan: EvaluationPlan | None) -> None:
    """Evaluate until cancelled, or until the event log cannot be written, which the watcher reports."""
    try:
        await EvaluationKeeper(folder, event_log, plan).run()
    except* StorageError as errors:
        logger.debug("no more evaluations: %s", errors.exceptions[0])


async def _upload_if_wanted(hub: str, folders: Sequence[Path], manifest: Manifest, event_log: EventLog) -> None:
    """Send the final model to a repository of the Hub until cancelled; do nothing without its name."""
    if hub:
        size = FLOAT_BYTES * shape_table(manifest.model).numel
        await HubUploader(folders, hub, size, partial(is_final_round, event_log)).run()


def is_final_round(event_log: EventLog, number: int) -> bool:
    """Return whether a run that has reached its target ended with that round."""
    state = event_log.state
    return run_status(state)[0] == "done" and state.rows.last is not None and number > state.rows.last.round


def print_join_info(dashboard: RunningDashboard, node: NodeHandle, address: DashboardAddress) -> None:
    """Print where the page is, the line that others copy, and the fingerprint that they compare."""
    voucher, manifest = dashboard.voucher, node.manifest
    join = join_line(f"{dashboard.page_url}run.toml", manifest)
    print(f"page         {dashboard.page_url}", flush=True)
    print(f"to take part {join}", flush=True)
    print(f"fingerprint  {fingerprint(voucher.organiser if voucher else node.peer_id)}", flush=True)
    if address.is_loopback_only:
        print("open to      this machine alone; --http 0.0.0.0:PORT opens it to others", flush=True)
    if manifest.run.organiser_key not in ("", node.peer_id) and voucher is None:
        logger.warning(
            "the organiser of this run does not vouch for this host, so volunteers see the host's own fingerprint; "
            "the organiser writes a voucher with `murmur ticket RUN %s --host`: save it as the file voucher in this "
            "host's folder, and start the host again",
            node.peer_id,
        )


def _log_watcher_end(task: asyncio.Task[None], is_trainer: bool) -> None:
    """Log the watcher's fault: expected errors in one line, others with a traceback."""
    if task.cancelled() or (error := task.exception()) is None:
        return
    note = "; training continues" if is_trainer else ""
    if isinstance(error, MurmurError):
        logger.error("the watcher has failed and the page is no longer updated%s: %s", note, error)
    else:
        logger.error("the watcher has failed and the page is no longer updated%s", note, exc_info=error)


async def build_announcement(
    node: NodeHandle, state: RunState, address: DashboardAddress, now: float, voucher: Voucher | None = None
) -> Announcement:
    """Build the public announcement of the run: its progress, its organiser, and the link to join it.

    `now` is in swarm time. Raises TransportError while this node's addresses cannot be read.
    """
    manifest, last, facts = node.manifest, state.rows.last, state.facts
    run = PublicRun(
        run=bytes.fromhex(manifest.run_id),
        name=manifest.run.name,
        recipe=manifest.method.recipe,
        parameters=shape_table(manifest.model).numel,
        peers=len(state.trainers),
        round=state.round,
        target_rounds=(facts.target_rounds if facts else None) or 0,
        tokens=last.tokens if last else 0,
        target_tokens=(facts.target_tokens if facts else None) or 0,
        link=join_link(manifest.run_id, sort_reachable_first(await node.transport.addresses()), address),
        organiser=voucher.organiser if voucher else "",
        voucher=voucher.signature if voucher else b"",
    )
    return make_run_announcement(node.identity, run, now)


def join_link(run_id: str, addresses: list[str], address: DashboardAddress) -> str:
    """Return the manifest's public URL if there is one, otherwise the run id at one of this node's addresses."""
    if address.public_url is not None or not addresses:
        return f"{address.public_url}/run.toml"
    return f"murmur://{run_id}@{addresses[0]}"

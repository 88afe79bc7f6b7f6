"""`murmur host` and `murmur replay`: serve the dashboard of a live run, or of a recorded one."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from node.commands.join.invitation import MANIFEST_FILE, Invitation, save_invitation
from node.commands.join.public_runs import packaged_peers
from node.commands.plan.command import warn_if_poor
from node.daemon.lifecycle import locked_run_dir, run_node
from node.daemon.node import Node
from node.daemon.stored_states.stage_stores import StageStores
from node.dashboard.evaluations import EvaluationPlan
from node.dashboard.event_log import EventLog, read_events
from node.dashboard.json_views import seconds_left
from node.dashboard.observer_node import Keeper, NodeHandle, gossiping, node_handle, open_observer_node, stop_on_signal
from node.dashboard.server import DashboardData, build_app
from node.dashboard.service import (
    MAX_CONNECTIONS,
    DashboardAddress,
    RunningDashboard,
    build_announcement,
    print_join_info,
    serve_dashboard,
)
from node.dashboard.state import RunState
from node.dashboard.steering import revision_values
from node.data.check import check_and_log_text, is_on_hub
from node.flags import NodeFlags
from node.from_manifest import require_program
from node.hub import HubRepository
from node.monitoring.display import Display, configure_logs
from node.monitoring.http_server import open_listener, serve
from node.monitoring.metrics import Metrics, serve_metrics
from node.monitoring.status import NodeStatus
from node.monitoring.training_log.recorder import recorded_metrics
from node.options import NodeOptions, parse_node_options
from node.own_loops import WEIGHTS_ONLY, require_our_loop
from node.own_ticket import require_admission
from node.paths import host_dir, registered
from node.processes.process import handle_stop_signals, raise_fd_limit
from node.processes.process_memory import enable_frequent_gc, trim_periodically
from node.run_dir import RunDir
from node.run_file import load_run_file
from node.trainer.devices.device import require_usable_device
from protocol.errors import DataError, MissingFileError, UsageError
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest
from protocol.membership.rendezvous import Rendezvous
from protocol.signing import peer_id_of
from protocol.tasks import cancel_and_wait


class ObserverStatus:
    """The answer of a host without a trainer to `murmur status`: the run as the host sees it."""

    def __init__(
        self, node: NodeHandle, dashboard: RunningDashboard, metrics: Metrics, keeper: Keeper | None = None
    ) -> None:
        manifest = node.manifest
        self._node = node
        self._event_log = dashboard.event_log
        self._metrics = metrics
        self._keeper = keeper
        self._constant_fields = NodeStatus(
            peer_id=node.peer_id,
            run=manifest.run.name,
            run_id=manifest.run_id,
            phase="watching",
            target_rounds=manifest.target.rounds,
            target_tokens=manifest.target.tokens,
            page=dashboard.page_url,
            since=time.time(),
        )

    def status(self) -> NodeStatus:
        """Return the host's current status."""
        state, transport = self._event_log.state, self._node.transport
        last, own = state.rows.last, self._node.directory.live().get(self._node.peer_id)
        other = self._node.directory.other_node_with_our_key()
        seen = {
            "round": state.round,
            "stages": state.stages,
            "chain_tokens": last.tokens if last else 0,
            "digest": last.digest if last else "",
            "seconds_left": seconds_left(state),
            "loss": last.loss if last else None,
            **_validation_fields(state),
            **_steered_fields(state),
            "peers": len(state.trainers),
            "key_conflict": other.describe() if other else "",
            "bytes_sent": transport.bytes_sent,
            "bytes_received": transport.bytes_received,
            "refusals": dict(self._metrics.refusals),
            "setbacks": dict(self._metrics.recovered_errors),
            "addresses": tuple(own.addresses) if own else (),
            "reason": self._keeper.describe() if self._keeper else "",
            "kept": self._keeper.describe() if isinstance(self._keeper, StageStores) else "",
            "trust": str(self._node.trust_point or ""),
        }
        return self._constant_fields.model_copy(update=seen)


def _validation_fields(state: RunState) -> dict[str, object]:
    """Return the newest validation loss of a recent round, and the number of rounds before it."""
    measured = [row for row in state.rows.recent(RECENT_ROUNDS) if row.validation_loss is not None]
    if not measured:
        return {}
    row = measured[-1]
    return {
        "validation_loss": row.validation_loss,
        "validation_round": row.round + 1,
        "validation_by_source": dict(row.validation_by_source),
    }


def _steered_fields(state: RunState) -> dict[str, object]:
    """Return the target in force and the organiser's revisions, as the page shows them."""
    if state.facts is None:
        return {}
    reports = state.steered.revisions if state.steered else ()
    next_round = state.rows.last.round + 1 if state.rows.last else 0
    in_force = [one.number for one in reports if one.holds_from is not None and one.holds_from <= next_round]
    return {
        "target_rounds": state.facts.target_rounds,
        "target_tokens": state.facts.target_tokens,
        "revision": max(in_force, default=0),
        "revisions": tuple(str(revision_values(report)["text"]) for report in reports),
    }


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """The command line of `murmur host`. `None` means not given."""

    run: Path
    folder: Path | None = None
    http: str
    public_url: str | None = None
    public: bool = False
    train: bool = False
    keep: bool = True
    evaluates: EvaluationPlan | None = None
    flags: NodeFlags = NodeFlags()


RECENT_ROUNDS = 256
OPEN_TO_ALL = (
    "anybody who finds this run can earn votes in it, and those who come first decide; to choose who takes part, begin "
    'a run with [admission] mode = "tickets" (`murmur init --public`), or name admission.founders'
)


def host(options: HostOptions) -> None:
    """Serve the run until Ctrl-C. Raises MurmurError."""
    signed = load_run_file(options.run)
    manifest = signed.manifest
    require_program(manifest, signed.text)  # an unknown method must fail before the folder is locked
    if options.evaluates is not None and manifest.model.is_custom:
        raise UsageError(f"--eval-every: {WEIGHTS_ONLY}")
    address = DashboardAddress.parse(options.http, options.public_url)
    if options.evaluates is not None and not (options.keep or options.train):
        raise UsageError("--eval-every needs the model; leave out --no-keep")
    _check_hub(manifest, has_model=options.keep or options.train)
    settings = parse_node_options(
        options.flags,
        manifest=manifest,
        base=options.run.parent.resolve(),
        folder=(options.folder or host_dir(manifest)).resolve(),
    )
    if options.train:
        if not settings.own_loop:
            require_our_loop(manifest)
        require_usable_device(settings)
        folder = RunDir(settings.folder)
        require_admission(manifest, folder, None, f"save its answer as {folder.ticket}")
    with configure_logs(settings.log_json, settings.verbose) as display:
        with display.activity("reading the text"):
            _check_text(settings, options.train)
        if not manifest.run.organiser_key:
            logger.info("nobody can steer this run: its manifest has no run.organiser_key, which `murmur init` writes")
        if manifest.host.hub:
            logger.info("the final model will be sent to %s on the Hugging Face Hub", manifest.host.hub)
        warn_if_poor(manifest, settings.listen)
        if options.public and manifest.admission.mode == "open" and not manifest.admission.founders:
            logger.warning(OPEN_TO_ALL)
        _save_text_base(settings)
        if options.train:
            asyncio.run(_host_and_train(settings, display, address, options))
        else:
            asyncio.run(_host_and_observe(settings, display, address, options))


def _check_hub(manifest: Manifest, has_model: bool) -> None:
    """Check at the start that this host can send the final model, if it should. Raises UsageError."""
    if not manifest.host.hub:
        return
    if not has_model:
        raise UsageError("host.hub needs the model; leave out --no-keep")
    HubRepository.open(manifest.host.hub, "host.hub")


def _check_text(settings: NodeOptions, is_needed: bool) -> None:
    """Check the text before the network starts. Raises DataError or MissingFileError if this host trains."""
    if settings.manifest.data.source == "own":
        logger.info("data: each peer brings its own")
        return
    if not is_needed and is_on_hub(settings.manifest, settings.base):
        return  # a host that watches downloads no text
    try:
        check_and_log_text(settings.manifest, settings.base)
    except (DataError, MissingFileError) as error:
        if is_needed:
            raise
        logger.info("data: this host does not train and does not have the text: %s", error)


def _save_text_base(settings: NodeOptions) -> None:
    """Note in the folder where the run's text is, for `murmur eval`. Raises StorageError."""
    manifest = settings.folder / MANIFEST_FILE
    if not manifest.exists() or load_manifest(manifest).run_id == settings.run_id:  # else the node refuses the folder
        save_invitation(settings.folder, Invitation(settings.manifest, None, settings.base))


async def _host_and_train(
    settings: NodeOptions, display: Display, address: DashboardAddress, options: HostOptions
) -> None:
    """Run an ordinary node with the dashboard in the same process; the node continues if the dashboard fails."""
    folder = RunDir(settings.folder)

    @asynccontextmanager
    async def dashboard_of(node: Node) -> AsyncIterator[None]:
        handle = node_handle(node)
        async with serve_dashboard(
            handle, folder, address, evaluates=options.evaluates, hub=settings.manifest.host.hub
        ) as dashboard:
            print_join_info(dashboard, handle, address)
            if options.public:
                _announce_run(node.rendezvous, handle, dashboard, address)
            yield

    await run_node(settings.model_copy(update={"stays": True}), display, dashboard_of)


def _announce_run(
    rendezvous: Rendezvous, node: NodeHandle, dashboard: RunningDashboard, address: DashboardAddress
) -> None:
    entry_points = {peer_id_of(address): (address,) for address in packaged_peers()}
    rendezvous.advertise_run(
        lambda now: build_announcement(node, dashboard.event_log.state, address, now, dashboard.voucher), entry_points
    )
    logger.info("the run is announced; `murmur runs --peer ADDRESS` shows it")


async def _host_and_observe(
    settings: NodeOptions, display: Display, address: DashboardAddress, options: HostOptions
) -> None:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(locked_run_dir(settings))
        folder.copy_tokenizer(settings.manifest, settings.base)
        with display.activity("connecting to the network"):
            opening = open_observer_node(settings, folder, keeps=options.keep)
            observer, keeper = await stack.enter_async_context(opening)
        observer.directory.subscribe(display.names)
        handle = node_handle(observer, has_model=options.keep)
        dashboard = await stack.enter_async_context(
            serve_dashboard(handle, folder, address, evaluates=options.evaluates, hub=settings.manifest.host.hub)
        )
        print_join_info(dashboard, handle, address)
        status = ObserverStatus(handle, dashboard, observer.metrics, keeper)
        port = await stack.enter_async_context(serve_metrics(settings.metrics, observer.metrics, status))
        enable_frequent_gc()
        folder.write_node_info(handle.peer_id, await handle.transport.addresses(), port)
        recorded = recorded_metrics(folder.path, status, observer.metrics, settings.log)
        await stack.enter_async_context(recorded)
        stack.enter_context(registered(folder.path))
        if options.public:
            _announce_run(observer.rendezvous, handle, dashboard, address)
        keeping = [asyncio.create_task(keeper.run(), name="state keeper")] if keeper else []
        await _run_until_stopped(observer, {dashboard.watcher_task, *keeping}, display, status)
        folder.write_final_status(status.status().model_dump_json())
    last = status.status()
    logger.info("the host has stopped after %s; the same command serves the run again", last.describe_round())


async def _run_until_stopped(
    observer: Node, endless: set[asyncio.Task[None]], display: Display, status: ObserverStatus
) -> None:
    """Gossip until a signal comes or an endless task ends; then tell the other peers that this node leaves."""
    stop = stop_on_signal(display)
    stopped, trimming = asyncio.create_task(stop.wait()), asyncio.create_task(trim_periodically())
    shown = asyncio.create_task(display.show_status(status))
    try:
        async with gossiping(observer) as loops:
            done, _ = await asyncio.wait(
                {*endless, stopped, trimming, shown, *loops}, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                await task
    finally:
        await cancel_and_wait((stopped, trimming, shown))


def replay(event_file: Path, http: str) -> None:
    """Serve a recorded run until Ctrl-C. Raises MurmurError."""
    event_log = EventLog(None, read_events(event_file))
    if event_log.state.facts is None:
        raise DataError(f"{event_file} does not describe a run; name the events.jsonl of a host")
    configure_logs()
    raise_fd_limit()
    asyncio.run(_serve_replay(event_log, DashboardAddress.parse(http, None)))


async def _serve_replay(event_log: EventLog, address: DashboardAddress) -> None:
    data = DashboardData(event_log, None, clock=lambda: event_log.state.newest_at)
    stop = asyncio.Event()
    handle_stop_signals(asyncio.get_running_loop(), stop.set)
    async with serve(build_app(data), open_listener(address.host, address.port, "--http"), MAX_CONNECTIONS) as port:
        print(f"page  http://{address.host}:{port}/", flush=True)
        await stop.wait()

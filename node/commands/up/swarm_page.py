"""The page of a local swarm: a node that only observes, in the process of `murmur up`."""

import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from node.dashboard.command import ObserverStatus
from node.dashboard.observer_node import gossiping, node_handle, open_observer_node
from node.dashboard.service import DashboardAddress, RunningDashboard, serve_dashboard
from node.flags import NodeFlags
from node.monitoring.logs import PlainFormatter
from node.monitoring.metrics import serve_metrics
from node.options import LISTEN_ON_LOOPBACK, NodeOptions, parse_node_options
from node.paths import registered
from node.processes.process import raise_fd_limit
from node.run_dir import RunDir
from protocol.manifest.run import Manifest

LOG_FILE = "log"


@dataclass(frozen=True)
class SwarmPage:
    """The dashboard, and the addresses at which the peers find its node."""

    dashboard: RunningDashboard
    entry_points: tuple[str, ...]


@contextlib.asynccontextmanager
async def serve_swarm_page(
    manifest: Manifest, folder: Path, address: DashboardAddress, model_folders: Sequence[Path]
) -> AsyncIterator[SwarmPage]:
    """Serve the page inside the context; samples are of the newest model in the peers' folders, or in that above them.

    `folder` keeps the node's key and the event log. Raises MurmurError.
    """
    raise_fd_limit()
    settings = observer_options(manifest, folder)
    with RunDir(folder).lock(manifest) as run_dir, _logging_to(folder / LOG_FILE):
        async with open_observer_node(settings, run_dir, keeps=False) as (observer, _):
            handle = node_handle(observer)
            async with serve_dashboard(handle, run_dir, address, model_folders) as dashboard, gossiping(observer):
                status = ObserverStatus(handle, dashboard, observer.metrics)
                async with serve_metrics(settings.metrics, observer.metrics, status) as port:
                    addresses = tuple(await handle.transport.addresses())
                    run_dir.write_node_info(handle.peer_id, addresses, port)
                    with registered(folder):
                        yield SwarmPage(dashboard, addresses[:1])
                run_dir.write_final_status(status.status().model_dump_json())


def observer_options(manifest: Manifest, folder: Path) -> NodeOptions:
    """Return the options of the observing node: only peers on this machine can reach it."""
    flags = NodeFlags(name="page", listen=[LISTEN_ON_LOOPBACK], direct="off")
    return parse_node_options(flags, manifest=manifest, base=folder.parent.resolve(), folder=folder.resolve())


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Write log lines of this process to a file, because the terminal shows the table of the swarm."""
    handler, root = logging.FileHandler(path), logging.getLogger()
    handler.setFormatter(PlainFormatter())
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()

"""What a host that only watches says of itself when `murmur status` asks: the run as it sees it."""

import time
from collections.abc import Callable

from node.daemon.metrics import Metrics
from node.host.hosting import RunningDashboard
from node.host.window import NodeHandle
from node.status import NodeStatus


def observer_status(node: NodeHandle, dashboard: RunningDashboard, metrics: Metrics) -> Callable[[], NodeStatus]:
    manifest = node.manifest
    beginning = NodeStatus(
        peer_id=node.peer_id,
        run=manifest.run.name,
        run_id=manifest.run_id,
        phase="watching",
        target_rounds=manifest.target.rounds,
        target_tokens=manifest.target.tokens,
        page=dashboard.page_url,
        since=time.time(),
    )

    def now() -> NodeStatus:
        state, transport = dashboard.event_log.state, node.transport
        last, own = state.rows.last, node.directory.live().get(node.peer_id)
        seen = {
            "round": last.round + 1 if last else 0,
            "chain_tokens": last.tokens if last else 0,
            "digest": last.digest if last else "",
            "loss": last.loss if last else None,
            "peers": len(state.trainers),
            "bytes_sent": transport.bytes_sent,
            "bytes_received": transport.bytes_received,
            "refusals": dict(metrics.refusals),
            "addresses": tuple(own.addresses) if own else (),
        }
        return beginning.model_copy(update=seen)

    return now

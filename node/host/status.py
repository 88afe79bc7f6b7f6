"""What a host that only watches says of itself when `murmur status` asks: the run as it sees it."""

import time
from collections.abc import Callable

from node.daemon.metrics import Metrics
from node.host.hosting import Hosting
from node.host.window import Window
from node.status import NodeStatus


def watching_status(window: Window, shown: Hosting, metrics: Metrics) -> Callable[[], NodeStatus]:
    manifest = window.manifest
    beginning = NodeStatus(
        peer_id=window.peer_id,
        run=manifest.run.name,
        run_id=manifest.run_id,
        phase="watching",
        target_rounds=manifest.target.rounds,
        target_tokens=manifest.target.tokens,
        page=shown.page,
        since=time.time(),
    )

    def now() -> NodeStatus:
        state, transport = shown.recorder.state, window.transport
        last, own = state.rows.last, window.directory.live().get(window.peer_id)
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

"""The status of a host without a trainer, in /status and /metrics."""

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from node.dashboard.command import ObserverStatus
from node.dashboard.observer_node import NodeHandle
from node.monitoring.metrics import Metrics
from tests.node.dashboard.example_events import apply_all, committed, opening_events
from tests.node.small_run import MANIFEST, PEERS


def test_refusals_are_in_the_status_and_in_the_metrics() -> None:
    directory = SimpleNamespace(live=dict, refusals=Counter(forged=2), other_node_with_our_key=lambda: None)
    parts = {
        "directory": directory,
        "transport": SimpleNamespace(bytes_sent=5, bytes_received=6, refusals=Counter(flood=1, forged=1)),
    }
    handle = cast(NodeHandle, SimpleNamespace(manifest=MANIFEST, peer_id=PEERS[0].peer_id, trust_point=None, **parts))
    dashboard: Any = SimpleNamespace(
        event_log=SimpleNamespace(state=apply_all([*opening_events(), committed(0)])), page_url="here"
    )
    metrics = Metrics()
    for counter in (*parts.values(), SimpleNamespace(refusals={"dht": 4})):
        metrics.add_refusal_counter(counter)
    status = ObserverStatus(handle, dashboard, metrics)
    metrics.read_status_from(status)
    assert status.status().refusals == {"forged": 3, "flood": 1, "dht": 4} and status.status().round == 1
    (family,) = [family for family in metrics.collect() if family.name == "murmur_refusals"]
    counts = {sample.labels["reason"]: sample.value for sample in family.samples if sample.name.endswith("_total")}
    assert counts == {"forged": 3, "flood": 1, "dht": 4}

"""What a host that only watches tells of itself, in both places alike."""

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from node.dashboard.command import ObserverStatus
from node.dashboard.observer_node import NodeHandle
from node.monitoring.metrics import Metrics
from tests.node.dashboard.example_events import apply_all, committed, opening_events
from tests.node.small_run import MANIFEST, PEERS


def test_what_was_refused_is_in_the_status_and_in_the_metrics() -> None:
    parts = {
        "directory": SimpleNamespace(live=dict, refusals=Counter(forged=2)),
        "transport": SimpleNamespace(bytes_sent=5, bytes_received=6, refusals=Counter(flood=1, forged=1)),
    }
    window = cast(NodeHandle, SimpleNamespace(manifest=MANIFEST, peer_id=PEERS[0].peer_id, **parts))
    shown: Any = SimpleNamespace(
        event_log=SimpleNamespace(state=apply_all([*opening_events(), committed(0)])), page_url="here"
    )
    metrics = Metrics()
    for counter in (*parts.values(), SimpleNamespace(refusals={"dht": 4})):
        metrics.add_refusal_counter(counter)
    status = ObserverStatus(window, shown, metrics)
    metrics.read_status_from(status)
    assert status.status().refusals == {"forged": 3, "flood": 1, "dht": 4} and status.status().round == 1
    (family,) = [family for family in metrics.collect() if family.name == "murmur_refusals"]
    told = {sample.labels["reason"]: sample.value for sample in family.samples if sample.name.endswith("_total")}
    assert told == {"forged": 3, "flood": 1, "dht": 4}

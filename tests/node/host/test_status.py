"""What a host that only watches tells of itself, in both places alike."""

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from node.daemon.metrics import Metrics
from node.host.observer import Observer
from node.host.status import watching_status
from node.host.window import Window
from tests.node.host.story import beginning, committed, folded
from tests.node.small_run import MANIFEST, PEERS


def test_what_was_refused_is_in_the_status_and_in_the_metrics() -> None:
    parts = {
        "directory": SimpleNamespace(live=dict, refusals=Counter(forged=2)),
        "transport": SimpleNamespace(bytes_sent=5, bytes_received=6, refusals=Counter(flood=1, forged=1)),
    }
    window = cast(Window, SimpleNamespace(manifest=MANIFEST, peer_id=PEERS[0].peer_id, **parts))
    shown: Any = SimpleNamespace(recorder=SimpleNamespace(state=folded([*beginning(), committed(0)])), page="here")
    metrics, observer = Metrics(), Observer(window, cast(Any, SimpleNamespace(refused=4)))
    metrics.add_refusals(observer.refusals)
    status = watching_status(window, shown, metrics)
    metrics.watch(status)
    assert status().refusals == {"forged": 3, "flood": 1, "dht": 4} and status().round == 1
    (family,) = [family for family in metrics.collect() if family.name == "murmur_refusals"]
    told = {sample.labels["reason"]: sample.value for sample in family.samples if sample.name.endswith("_total")}
    assert told == {"forged": 3, "flood": 1, "dht": 4}

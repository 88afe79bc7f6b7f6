"""The whole swarm in numbers for machines (/metrics). No peer's words are in it: it stays small whoever joins."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

GAUGES = (
    ("murmur_swarm_round", "Rounds committed", "round"),
    ("murmur_swarm_loss", "Training loss of the last round, nats a token", "loss"),
    ("murmur_swarm_validation_loss", "Loss on held-out text, nats a token", "validation"),
    ("murmur_swarm_tokens_per_second", "Speed of all peers together", "tokens_per_second"),
    ("murmur_swarm_round_seconds", "Seconds a round takes", "round_seconds"),
    ("murmur_swarm_send_bytes_per_second", "What all peers send", "sending"),
    ("murmur_swarm_progress", "Share of the target", "progress"),
    ("murmur_swarm_missing_rounds", "Rounds that the host could not learn of", "missing"),
)


class SwarmCollector(Collector):
    """Read at each scrape from what `values` gives: `views.snapshot`."""

    def __init__(self, values: Callable[[], Mapping[str, Any]]) -> None:
        self._values = values
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        values = self._values()
        yield InfoMetricFamily("murmur_swarm", "The run", value={key: values.get(key, "") for key in ("run", "run_id")})
        yield CounterMetricFamily("murmur_swarm_tokens", "Tokens in all committed rounds", value=values["tokens"])
        for name, text, key in GAUGES:
            if values[key] is not None:
                yield GaugeMetricFamily(name, text, value=values[key])
        yield _peer_count_family(values)


def _peer_count_family(values: Mapping[str, Any]) -> GaugeMetricFamily:
    family = GaugeMetricFamily("murmur_swarm_peers", "Peers by what they do", labels=["state"])
    counts = dict.fromkeys(("training", "resting", "late", "behind", "joining", "watching"), 0)
    for peer in values["peers"]:
        if peer["state"] in counts:
            counts[peer["state"]] += 1
    for state, count in counts.items():
        family.add_metric([state], count)
    return family

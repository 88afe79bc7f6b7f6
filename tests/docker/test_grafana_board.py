"""Every figure that the board asks for is one that a node or a host tells."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from node.dashboard.server import GAUGES, SwarmCollector
from node.monitoring.metrics import Metrics
from node.monitoring.status import NodeStatus
from tests.node.monitoring.fixed_status import FixedStatus

BOARD = json.loads((Path(__file__).parents[2] / "docker" / "grafana" / "board.json").read_text())
STATUS = NodeStatus(
    peer_id="p",
    run="r",
    run_id="0",
    loss=1.0,
    validation_loss=1.0,
    learning_rate=1.0,
    gradient_norm=1.0,
    device_use=1.0,
    device_memory=1,
    device_memory_total=1,
    seconds={"compute": 1.0},
    bytes_sent_by_kind={"blobs": 1},
    bytes_fetched_by_path={"direct": 1},
)
OF_PROMETHEUS = {"instance", "job"}
METRIC = re.compile(r"\bmurmur_\w+")
LABEL = re.compile(r"[{,]\s*(\w+)\s*=~?\"|\{\{(\w+)\}\}")
GROUP = re.compile(r"\bby \(([^)]*)\)")


def exported_labels() -> dict[str, set[str]]:
    """The labels of each sample, by its name, of a node and of a host that know all there is to know."""
    metrics = Metrics()
    metrics.read_status_from(FixedStatus(STATUS))
    metrics.record_round("included")
    metrics.record_refusal("forged")
    metrics.record_missed("late", 1)
    values: dict[str, Any] = {"run": "r", "run_id": "0", "tokens": 1, "peers": []}
    figures = SwarmCollector(lambda: values | {key: 1.0 for _, _, key in GAUGES})
    families: Iterator[Metric] = (family for source in (metrics, figures) for family in source.collect())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def unknown_names(board: dict[str, Any]) -> set[str]:
    """Metrics and labels that the board names and nobody tells."""
    known, found = exported_labels(), set()
    for target in (target for panel in board["panels"] for target in panel["targets"]):
        names = set(METRIC.findall(target["expr"]))
        labels = {
            label for pair in LABEL.findall(target["expr"] + target.get("legendFormat", "")) for label in pair if label
        }
        labels |= {word.strip() for group in GROUP.findall(target["expr"]) for word in group.split(",")}
        found |= names - known.keys()
        found |= labels - OF_PROMETHEUS - {label for name in names & known.keys() for label in known[name]}
    return found


def with_expression(expression: str) -> dict[str, Any]:
    return {"panels": [{"targets": [{"expr": expression}]}]}


def test_the_board_names_only_what_is_told() -> None:
    assert unknown_names(BOARD) == set()


def test_a_stranger_is_noticed() -> None:
    assert unknown_names(with_expression("rate(murmur_bytes[1m])")) == {"murmur_bytes"}  # a counter ends in _total
    assert unknown_names(with_expression('murmur_bytes_total{way="sent"}')) == {"way"}
    assert unknown_names(with_expression("sum by (kind, peer) (murmur_bytes_total)")) == {"peer"}


def test_every_panel_asks_something_of_the_source_that_is_set_up() -> None:
    assert len(BOARD["panels"]) == len({panel["id"] for panel in BOARD["panels"]})
    for panel in BOARD["panels"]:
        assert panel["targets"] and panel["datasource"] == {"type": "prometheus", "uid": "prometheus"}
        assert all(METRIC.search(target["expr"]) for target in panel["targets"])


def test_panels_do_not_overlap() -> None:
    cells = [
        (place["x"] + column, place["y"] + row)
        for place in (panel["gridPos"] for panel in BOARD["panels"])
        for column in range(place["w"])
        for row in range(place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(column for column, _ in cells) < 24

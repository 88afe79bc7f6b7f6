"""The lines of metrics: when one is due, files of bounded size, and a reader that misses no line."""

import json
from pathlib import Path

import pytest

from node.monitoring.status import NodeStatus
from node.monitoring.training_log import file as module
from node.monitoring.training_log.file import (
    INTERVAL_SECONDS,
    METRICS_FILE,
    Follower,
    MetricsLine,
    append_line,
    is_line_due,
    is_new,
)

STATUS = NodeStatus(peer_id="a", run="test", run_id="0" * 64, round=3, step=40, tokens=900, chain_tokens=2700, peers=3)
LINE = MetricsLine.of(STATUS, 100.0)


def test_line_has_the_figures_of_the_status_and_no_odd_number() -> None:
    status = STATUS.model_copy(update={"loss": 2.5, "gradient_norm": float("inf"), "bytes_sent": 77})
    values = json.loads(MetricsLine.of(status, 12.34567).model_dump_json(exclude_none=True))
    assert values == {
        "time": 12.346,
        "round": 3,
        "step": 40,
        "tokens": 900,
        "run_tokens": 2700,
        "peers": 3,
        "bytes_sent": 77,
        "bytes_received": 0,
        "loss": 2.5,
        "tokens_per_second": 0.0,
    }


def test_a_line_is_due_once_a_round_and_now_and_then_in_a_long_one() -> None:
    later = LINE.model_copy(update={"time": 100.0 + INTERVAL_SECONDS, "step": 50})
    assert is_line_due(None, LINE) and not is_line_due(None, LINE.model_copy(update={"round": 0, "step": 0}))
    assert is_line_due(LINE, LINE.model_copy(update={"round": 4}))
    assert is_line_due(LINE, LINE.model_copy(update={"round": 2})), "another chain"
    assert is_line_due(LINE, later)
    assert not is_line_due(LINE, later.model_copy(update={"time": 101.0}))
    assert not is_line_due(LINE, LINE.model_copy(update={"time": 1e6})), "a node that waits writes nothing"
    assert is_new(LINE, LINE.model_copy(update={"validation_loss": 2.0})) and not is_new(
        LINE, LINE.model_copy(update={"time": 1e6})
    )


@pytest.mark.parametrize("max_bytes", [1, 60, 1000])
def test_files_are_bounded_and_a_follower_reads_every_line(tmp_path: Path, max_bytes: int) -> None:
    follower, read = Follower(tmp_path, 0), list[int]()
    for number in range(100):
        append_line(tmp_path, json.dumps({"number": number}), max_bytes)
        if max_bytes == 1 or number % 3 == 0:  # no more than one replacement between two reads
            read += [json.loads(line)["number"] for line in follower.read_lines()]
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * (max_bytes + 20)
    read += [json.loads(line)["number"] for line in follower.read_lines()]
    follower.close()
    assert read == list(range(100))
    assert {path.name for path in tmp_path.iterdir()} <= {METRICS_FILE, "metrics.1.jsonl"}


def test_follower_begins_at_its_offset_and_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    append_line(tmp_path, "old")
    follower = Follower(tmp_path, 4)
    assert follower.read_lines() == []
    with (tmp_path / METRICS_FILE).open("ab") as file:
        file.write(b"ha")
        file.flush()
        assert follower.read_lines() == []
        file.write(b"lf\nwhole\n")
    assert follower.read_lines() == [b"half", b"whole"]
    follower.close()


def test_default_size_is_small() -> None:
    assert module.MAX_FILE_BYTES <= 16 << 20

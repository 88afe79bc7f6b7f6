"""The recorder of a node's metrics, and the process of loggers beside it."""

import asyncio
import json
import logging
import os
import time
from pathlib import Path

import pytest

from node.monitoring.metrics import Metrics
from node.monitoring.status import NodeStatus
from node.monitoring.training_log import recorder
from node.monitoring.training_log import recorder as module
from node.monitoring.training_log.file import METRICS_FILE
from node.monitoring.training_log.recorder import MetricsRecorder, recorded_metrics

FAKE_WANDB = """
import json, os, pathlib, time
class Settings:
    def __init__(self, **values): pass
class Run:
    def define_metric(self, *names, **options): pass
    def log(self, values):
        print("chatter")
        with open(os.environ["FAKE_LOG"], "a") as file: file.write(json.dumps(values) + "\\n")
        while os.environ.get("FAKE_HANGS"): time.sleep(1)
    def finish(self): pass
def init(**options): return Run()
def teardown(): pass
"""


class Source:
    """A node whose status a test sets."""

    def __init__(self) -> None:
        self.value = NodeStatus(peer_id="peer", run="test", run_id="0" * 64)

    def status(self) -> NodeStatus:
        return self.value

    def set(self, **values: object) -> None:
        self.value = self.value.model_copy(update=values)


def lines_in(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_metrics_of_each_round_and_the_last_ones_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.005)
    source = Source()
    async with recorded_metrics(tmp_path, source, Metrics(), ()):
        for number in range(1, 4):
            source.set(round=number, step=number * 5, loss=4.0 - number)
            async with asyncio.timeout(10):
                while len(lines_in(tmp_path / METRICS_FILE)) < number:
                    await asyncio.sleep(0.005)
        source.set(validation_loss=0.5)
    lines = lines_in(tmp_path / METRICS_FILE)
    assert [line["round"] for line in lines] == [1, 2, 3, 3] and lines[-1]["validation_loss"] == 0.5
    assert "validation_loss" not in lines[2]


async def test_node_that_comes_back_writes_no_line_before_its_trainer_reports(tmp_path: Path) -> None:
    source = Source()
    recorder = MetricsRecorder(tmp_path, source, Metrics())
    source.set(round=14)
    await recorder.record_if_due()
    await recorder.record_last()
    assert not lines_in(tmp_path / METRICS_FILE)
    source.set(phase="watching")
    await recorder.record_if_due()
    assert [line["round"] for line in lines_in(tmp_path / METRICS_FILE)] == [14], "a host has no steps to wait for"
    source.set(phase="training", round=15, step=75, tokens=19_200)
    await recorder.record_if_due()
    assert [(line["step"], line["tokens"]) for line in lines_in(tmp_path / METRICS_FILE)[1:]] == [(75, 19_200)]


async def test_disk_that_fails_costs_lines_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / METRICS_FILE).mkdir()
    source, metrics = Source(), Metrics()
    recorder = MetricsRecorder(tmp_path, source, metrics)
    with caplog.at_level(logging.WARNING):
        for number in range(1, 4):
            source.set(round=number, step=number)
            await recorder.record_if_due()
    assert metrics.recovered_errors["not logged"] == 3
    assert len(caplog.records) == 1 and "cannot write metrics" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True])
async def test_logger_process_follows_the_metrics_and_ends_with_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hangs: bool
) -> None:
    """A package in the place of wandb prints, notes what it gets, and hangs in one of the two cases."""
    (tmp_path / "packages" / "wandb").mkdir(parents=True)
    (tmp_path / "packages" / "wandb" / "__init__.py").write_text(FAKE_WANDB)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'packages'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "got"))
    monkeypatch.setenv("FAKE_HANGS", "1" if hangs else "")
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(recorder, "FINISH_SECONDS", 0.5 if hangs else 30.0)
    source, metrics, folder = Source(), Metrics(), tmp_path / "node"
    folder.mkdir()
    (folder / METRICS_FILE).write_text('{"time": 1, "round": 77, "comment": "of an earlier start"}\n')
    with caplog.at_level(logging.WARNING):
        async with recorded_metrics(folder, source, metrics, ("wandb",)):
            source.set(round=1, step=5, loss=3.0)
            async with asyncio.timeout(60):
                while not lines_in(tmp_path / "got"):
                    await asyncio.sleep(0.02)
            source.set(round=2, step=10, loss=2.0)
            ended = time.monotonic()
        took = time.monotonic() - ended
    got = [(line["round"], line["loss"]) for line in lines_in(tmp_path / "got")]
    if hangs:
        assert got == [(1, 3)] and took < 20
        assert metrics.recovered_errors["not logged"] == 1 and "did not end in time" in caplog.text
    else:
        assert got == [(1, 3), (2, 2)] and not caplog.records and not metrics.recovered_errors

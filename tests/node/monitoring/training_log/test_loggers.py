"""Loggers that hang, fail or are not there stop nobody, and what they miss is counted."""

import importlib.util
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from node.monitoring.training_log.loggers import (
    HANG_SECONDS,
    MAX_FAILURES,
    MAX_QUEUED,
    LoggedRun,
    LoggerThread,
    TensorBoardLogger,
    Values,
    finite_numbers,
)


class FakeLogger:
    """Notes what it gets; waits at `gate` before each line, and fails where `fails` says so."""

    def __init__(self, fails: Callable[[int], bool] = lambda number: False) -> None:
        self.gate, self.got, self.closed = threading.Event(), list[Values](), False
        self.entered = threading.Event()
        self._fails, self._count = fails, 0

    def write(self, values: Values) -> None:
        self.entered.set()
        self.gate.wait()
        self._count += 1
        if self._fails(self._count):
            raise RuntimeError("no\nroom")
        self.got.append(values)

    def close(self) -> None:
        self.closed = True


def values(number: int) -> Values:
    return {"round": float(number), "time": 0.0}


def finish(thread: LoggerThread, seconds: float = 10.0) -> bool:
    return thread.finish(time.monotonic() + seconds)


def test_every_line_reaches_a_logger_that_works() -> None:
    fake, lines = FakeLogger(), list[str]()
    fake.gate.set()
    thread = LoggerThread("fake", lambda: fake, lines.append)
    for number in range(20):
        thread.offer(values(number))
    assert finish(thread) and fake.closed and fake.got == [values(number) for number in range(20)] and lines == []


def test_logger_that_hangs_costs_lines_and_no_time() -> None:
    fake, lines = FakeLogger(), list[str]()
    thread = LoggerThread("fake", lambda: fake, lines.append)
    thread.offer(values(0))
    assert fake.entered.wait(10)
    before = time.monotonic()
    for number in range(MAX_QUEUED + 50):
        thread.offer(values(number))
    assert time.monotonic() - before < 5 and thread.dropped == 50
    thread.check(before + HANG_SECONDS - 1)
    assert lines == []
    for _ in range(3):
        thread.check(time.monotonic() + HANG_SECONDS + 1)
    assert lines == ["fake has not answered for 30 s; training goes on without it"]
    assert not finish(thread, 0.2)
    assert "missed" in lines[-1] and "did not end in time" in lines[-1] and len(lines) == 2
    direct = threading.Thread(target=fake.write, args=(values(1),), daemon=True)
    direct.start()
    direct.join(0.2)
    assert direct.is_alive(), "the control: a caller of the logger itself waits"
    fake.gate.set()


def test_logger_that_fails_is_reported_once_and_given_up_in_the_end() -> None:
    fake, lines = FakeLogger(lambda number: number != 3), list[str]()
    fake.gate.set()
    thread = LoggerThread("fake", lambda: fake, lines.append)
    for number in range(MAX_FAILURES + 20):
        thread.offer(values(number))
    assert finish(thread)
    assert lines == [
        "fake fails: no room",
        "fake fails: no room",
        f"fake logged 1 lines and missed {MAX_FAILURES + 19}",
    ]


def test_logger_that_cannot_be_opened_is_one_line() -> None:
    lines: list[str] = []

    def fail() -> FakeLogger:
        raise ImportError("no module")

    thread = LoggerThread("fake", fail, lines.append)
    assert finish(thread) and lines == ["fake cannot be opened: no module"]


def test_lines_that_are_no_metrics_are_left_out() -> None:
    assert finite_numbers({"round": 1, "time": 2.0, "loss": 3, "name": "x"}) == {"round": 1, "time": 2, "loss": 3}
    assert (
        finite_numbers([]) is finite_numbers({"round": 1}) is finite_numbers({"round": 1, "time": float("nan")}) is None
    )


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_reads_the_event_file(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    thread = LoggerThread("tensorboard", lambda: TensorBoardLogger(run_in(tmp_path)), print)
    for number in range(5):
        thread.offer({"round": float(number), "time": 100.0 + number, "loss": 5.0 - number})
    assert finish(thread, 60)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [(event.step, event.wall_time, event.value) for event in events] == [
        (number, 100.0 + number, 5.0 - number) for number in range(5)
    ]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_logs_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from node.monitoring.training_log.loggers import WandbLogger

    monkeypatch.setenv("WANDB_MODE", "offline")
    thread = LoggerThread("wandb", lambda: WandbLogger(run_in(tmp_path)), print)
    for number in range(5):
        thread.offer({"round": float(number), "time": 100.0 + number, "loss": 5.0 - number})
    assert finish(thread, 60) and thread.logged == 5
    (record,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"loss" in record.read_bytes()


def run_in(folder: Path) -> LoggedRun:
    return LoggedRun(folder, "starlings", "ab" * 32, "12D3KooWabcdefghijklmnop", "mary")

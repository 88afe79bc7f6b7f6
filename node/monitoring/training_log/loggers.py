"""Loggers of other packages: what each does with the metrics, and a thread for each, so that one may hang alone."""

import contextlib
import importlib.util
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

LOGGERS: Final = ("tensorboard", "wandb")  # the names are those of the packages, too
MAX_QUEUED: Final = 256  # lines that a logger may be behind
MAX_FAILURES: Final = 10  # in a row
HANG_SECONDS: Final = 30.0
FINISH_SECONDS: Final = 10.0
X_AXIS: Final = "round"
Values = Mapping[str, float]


def is_installed(name: str) -> bool:
    """Return whether the package of a logger is here, without importing it."""
    return importlib.util.find_spec(name) is not None


@dataclass(frozen=True)
class LoggedRun:
    """The run and the node whose metrics are logged."""

    folder: Path
    run: str
    run_id: str
    peer: str
    name: str


class Logger(Protocol):
    """A logger of a package; each call may fail, and may take as long as it likes."""

    def write(self, values: Values) -> None:
        """Log one line of metrics."""

    def close(self) -> None:
        """Write what is left."""


class TensorBoardLogger:
    """Writes event files into the folder `tensorboard`."""

    def __init__(self, run: LoggedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run.folder / "tensorboard"), flush_secs=10)

    def write(self, values: Values) -> None:
        """Log the metrics at their round."""
        scalars = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if name not in (X_AXIS, "time")
        ]
        step, at = int(values[X_AXIS]), values["time"]
        self._writer.add_event(self._event(step=step, wall_time=at, summary=self._summary(value=scalars)))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandbLogger:
    """Logs to Weights & Biases, or with WANDB_MODE=offline into the folder `wandb`; a restarted node continues."""

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        self._package: Any = wandb
        self._run: Any = wandb.init(
            project=run.run,
            group=run.run_id[:8],
            name=run.name,
            id=f"{run.run_id[:8]}-{run.peer[-16:]}",
            resume="allow",
            dir=str(run.folder),
            settings=wandb.Settings(console="off", init_timeout=HANG_SECONDS),
        )
        self._run.define_metric("*", step_metric=X_AXIS)

    def write(self, values: Values) -> None:
        """Log the metrics."""
        self._run.log(dict(values))

    def close(self) -> None:
        """Send what is left, or write it to disk, which the package's own process does as it ends."""
        self._run.finish()
        self._package.teardown()


KINDS: Final[Mapping[str, Callable[[LoggedRun], Logger]]] = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger}


class LoggerThread:
    """Feeds one logger in a thread of its own. Metrics that the logger cannot take are dropped and counted.

    `report` receives one line when the logger cannot be opened, fails for the first time, hangs, or drops something.
    """

    def __init__(self, name: str, open_logger: Callable[[], Logger], report: Callable[[str], None]) -> None:
        self._name = name
        self._open = open_logger
        self._report = report
        self._queue: queue.Queue[Values | None] = queue.Queue(MAX_QUEUED)
        self._busy_since: float | None = None
        self._is_hanging = False
        self._given_up = False
        self.dropped = self.logged = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def offer(self, values: Values) -> None:
        """Queue a line, or drop it if the logger is too slow."""
        if self._given_up:
            self.dropped += 1
            return
        try:
            self._queue.put_nowait(values)
        except queue.Full:
            self.dropped += 1

    def check(self, now: float) -> None:
        """Report once that the logger hangs."""
        since = self._busy_since
        if since is not None and now - since > HANG_SECONDS and not self._is_hanging:
            self._is_hanging = True
            self._report(f"{self._name} has not answered for {HANG_SECONDS:.0f} s; training goes on without it")

    def finish(self, deadline: float) -> bool:
        """Let the logger end until `deadline` on the monotonic clock; return whether it has."""
        while self._thread.is_alive():
            try:
                self._queue.put(None, timeout=max(0.0, min(0.1, deadline - time.monotonic())))
                break
            except queue.Full:
                if time.monotonic() >= deadline:
                    break
        self._thread.join(max(0.0, deadline - time.monotonic()))
        is_done = not self._thread.is_alive()
        self.dropped += sum(item is not None for item in tuple(self._queue.queue))
        if self.dropped or not is_done:
            late = "" if is_done else ", and did not end in time"
            self._report(f"{self._name} logged {self.logged} lines and missed {self.dropped}{late}")
        return is_done

    def _run(self) -> None:
        opened: Logger | None = None
        with self._guarded("cannot be opened"):
            opened = self._open()
        if opened is None:
            self._given_up = True
            return
        failures = 0
        while (values := self._queue.get()) is not None:
            with self._guarded("fails" if not failures else ""):
                opened.write(values)
                failures, self.logged = -1, self.logged + 1
            failures += 1
            self.dropped += failures > 0
            if failures >= MAX_FAILURES:
                self._given_up = True
                return
        with self._guarded("cannot be closed"):
            opened.close()

    @contextlib.contextmanager
    def _guarded(self, fault: str) -> Iterator[None]:
        """Turn an error of the package into a line, or into nothing without words for the fault."""
        self._busy_since = time.monotonic()
        try:
            yield
        except Exception as error:  # packages of others raise errors of many kinds
            if fault:
                text = " ".join(str(error).split()) or type(error).__name__
                self._report(f"{self._name} {fault}: {text}")
        finally:
            self._busy_since = None


def finite_numbers(line: object) -> Values | None:
    """Return the numbers in a line of metrics; `None` if it is none."""
    if not isinstance(line, dict):
        return None
    numbers = {str(name): float(value) for name, value in line.items() if isinstance(value, int | float)}
    is_whole = {X_AXIS, "time"} <= numbers.keys() and all(map(math.isfinite, numbers.values()))
    return numbers if is_whole else None

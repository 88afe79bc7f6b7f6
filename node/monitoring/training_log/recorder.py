"""Record the metrics of a node in its folder, and feed them to the process of other packages' loggers.

A full disk costs lines, and a logger that hangs or dies takes nothing with it: the node only reads the lines that its
process prints, and ends it at a deadline.
"""

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from node.monitoring.logs import sanitize
from node.monitoring.metrics import Metrics
from node.monitoring.status import NodeStatus, StatusSource
from node.monitoring.training_log.file import METRICS_FILE, MetricsLine, append_line, is_line_due, is_new
from node.monitoring.training_log.loggers import FINISH_SECONDS
from node.processes.process import python_environment
from protocol.tasks import cancel_and_wait

logger = logging.getLogger(__name__)
MODULE = "node.monitoring.training_log"
KILL_SECONDS = 5.0  # after that
MAX_SHOWN = 300
POLL_SECONDS = 1.0


class LoggerProcess:
    """Starts and ends the process, and logs what it reports; without loggers there is none."""

    def __init__(self, folder: Path, status: NodeStatus, loggers: Sequence[str], metrics: Metrics) -> None:
        self._folder = folder
        self._status = status
        self._loggers = loggers
        self._metrics = metrics
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process; a fault is logged and counted."""
        if not self._loggers:
            return
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", MODULE, self._configuration(),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
                env=python_environment(), process_group=0,  # a terminal's Ctrl-C reaches the node alone
            )  # fmt: skip
        except OSError as error:
            self._report(f"the loggers cannot be started: {error.strerror}")
            return
        self._reading = asyncio.create_task(self._read_reports(self._process), name="logger process")

    async def finish(self) -> None:
        """Let the loggers write what they have, and end them at the deadline."""
        if self._process is None or self._reading is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(FINISH_SECONDS + KILL_SECONDS):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        await cancel_and_wait((self._reading,))

    def _configuration(self) -> str:
        path, status = self._folder / METRICS_FILE, self._status
        return json.dumps(
            {
                "folder": str(self._folder.resolve()),
                "offset": path.stat().st_size if path.exists() else 0,
                "loggers": list(self._loggers),
                "finish_seconds": FINISH_SECONDS,
                "run": status.run,
                "run_id": status.run_id,
                "peer": status.peer_id,
                "name": status.name or status.peer_id[-8:],
            }
        )

    async def _read_reports(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self._report(sanitize(line.decode(errors="replace").strip())[:MAX_SHOWN])
        if code := await process.wait():
            self._report(f"the process of the loggers ended with exit code {code}; metrics go to {METRICS_FILE} only")

    def _report(self, line: str) -> None:
        self._metrics.record_recovered("not logged")
        logger.warning("not logged: %s", line)


class MetricsRecorder:
    """Writes a line of the status now and then. A disk that fails costs lines, which are counted, and nothing else."""

    def __init__(self, folder: Path, source: StatusSource, metrics: Metrics) -> None:
        self._folder = folder
        self._source = source
        self._metrics = metrics
        self._newest: MetricsLine | None = None
        self._has_failed = False

    async def run(self) -> None:
        """Record until cancelled."""
        while True:
            await self.record_if_due()
            await asyncio.sleep(POLL_SECONDS)

    async def record_if_due(self) -> None:
        """Write a line if one is due."""
        line = self._line()
        if line is not None and is_line_due(self._newest, line):
            await self._write(line)

    async def record_last(self) -> None:
        """Write a last line if it says more than the one before."""
        line = self._line()
        if line is not None and is_new(self._newest, line):
            await self._write(line)

    def _line(self) -> MetricsLine | None:
        """Return the line of now; None while a node that came back waits for its trainer to report steps and tokens."""
        status = self._source.status()
        if status.step == 0 and status.phase != "watching":
            return None
        return MetricsLine.of(status, time.time())

    async def _write(self, line: MetricsLine) -> None:
        self._newest = line
        try:
            await asyncio.to_thread(append_line, self._folder, line.model_dump_json(exclude_none=True))
        except OSError as error:
            self._metrics.record_recovered("not logged")
            level = logging.DEBUG if self._has_failed else logging.WARNING
            logger.log(level, "not logged: cannot write metrics in %s: %s", self._folder, error.strerror)
            self._has_failed = True


@contextlib.asynccontextmanager
async def recorded_metrics(
    folder: Path, source: StatusSource, metrics: Metrics, loggers: Sequence[str]
) -> AsyncIterator[None]:
    """Record the metrics of a node inside the context, and let `loggers` of other packages follow."""
    recorder = MetricsRecorder(folder, source, metrics)
    beside = LoggerProcess(folder, source.status(), loggers, metrics)
    await beside.start()
    recording = asyncio.create_task(recorder.run(), name="metrics recorder")
    try:
        yield
    finally:
        await cancel_and_wait((recording,))
        await recorder.record_last()
        await beside.finish()

"""Record the metrics of a node in its folder, whatever happens to the disk or to the loggers beside."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from node.monitoring.metrics import Metrics
from node.monitoring.status import StatusSource
from node.monitoring.training_log.file import append_line
from node.monitoring.training_log.line import MetricsLine, is_line_due, is_new
from node.monitoring.training_log.logger_process import LoggerProcess
from protocol.tasks import cancel_and_wait

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0


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
        line = MetricsLine.of(self._source.status(), time.time())
        if is_line_due(self._newest, line):
            await self._write(line)

    async def record_last(self) -> None:
        """Write a last line if it says more than the one before."""
        line = MetricsLine.of(self._source.status(), time.time())
        if is_new(self._newest, line):
            await self._write(line)

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

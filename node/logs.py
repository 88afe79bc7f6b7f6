"""Log lines: for a person, or one JSON object a line with --log-json. They go to standard error.

A person is told what happens; where something is wrong, also how wrong, and which module says so.
"""

import json
import logging
import sys
from types import TracebackType

from node.harmless import harmless

OURS = ("node", "protocol", "optim")
TOLD_BY_US = ("grpc._common",)  # a traceback for each message of a peer that does not parse: ours is one line
TOLD = "%(asctime)s %(message)s"
WORDS = {logging.WARNING: "warning", logging.ERROR: "error", logging.CRITICAL: "error"}
WARNED = "%(asctime)s {}: %(message)s [%(name)s]"
ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class LineFormatter(logging.Formatter):
    """A message is one line, whatever peers have said in it; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return harmless(super().formatMessage(record))

    def formatException(self, ei: ExceptionInfo) -> str:  # noqa: N802
        return harmless(super().formatException(ei), "\n")


class PlainFormatter(LineFormatter):
    def __init__(self) -> None:
        super().__init__(TOLD, "%H:%M:%S")
        self._warned = {level: LineFormatter(WARNED.format(word), "%H:%M:%S") for level, word in WORDS.items()}

    def format(self, record: logging.LogRecord) -> str:
        warned = self._warned.get(record.levelno)
        return warned.format(record) if warned else super().format(record)


def configure_logs(as_json: bool) -> None:
    """Ours from INFO on; what libraries say, from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else PlainFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in OURS:
        logging.getLogger(name).setLevel(logging.INFO)
    for name in TOLD_BY_US:
        logging.getLogger(name).setLevel(logging.CRITICAL)

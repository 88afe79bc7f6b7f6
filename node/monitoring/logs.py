"""What strangers say, be it a model or a peer, must not steer the terminal nor forge a line of the log. PURE.

Log lines: for a person, or one JSON object a line with --log-json. They go to standard error.

A person is told what happens; where something is wrong, also how wrong, and which module says so.
"""

import json
import logging
import sys
from types import TracebackType

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def sanitize(text: str, allowed: str = "") -> str:
    """One line that can only be read: what is not printable is marked, but for the characters in `kept`."""
    return "".join(sign if sign.isprintable() or sign in allowed else REPLACEMENT for sign in text)


OUR_PACKAGES = ("node", "protocol", "optim")
SILENCED_LOGGERS = ("grpc._common",)  # a traceback for each message of a peer that does not parse: ours is one line
INFO_FORMAT = "%(asctime)s %(message)s"
LEVEL_WORDS = {logging.WARNING: "warning", logging.ERROR: "error", logging.CRITICAL: "error"}
WARNING_FORMAT = "%(asctime)s {}: %(message)s [%(name)s]"
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
        return sanitize(super().formatMessage(record))

    def formatException(self, ei: ExceptionInfo) -> str:  # noqa: N802
        return sanitize(super().formatException(ei), "\n")


class PlainFormatter(LineFormatter):
    def __init__(self) -> None:
        super().__init__(INFO_FORMAT, "%H:%M:%S")
        self._warning_formatters = {
            level: LineFormatter(WARNING_FORMAT.format(word), "%H:%M:%S") for level, word in LEVEL_WORDS.items()
        }

    def format(self, record: logging.LogRecord) -> str:
        warned = self._warning_formatters.get(record.levelno)
        return warned.format(record) if warned else super().format(record)


def configure_logs(as_json: bool) -> None:
    """Ours from INFO on; what libraries say, from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else PlainFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in OUR_PACKAGES:
        logging.getLogger(name).setLevel(logging.INFO)
    for name in SILENCED_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)

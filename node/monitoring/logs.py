"""Configure logging, and sanitize text from peers and models before it reaches a terminal.

Text from a peer or a model must not control the terminal or forge a log line.

Log lines go to standard error: plain text for people, or one JSON object a line with --log-json. A plain line has the
time and the message; a warning or an error also has its level and its module.
"""

import json
import logging
import sys
from types import TracebackType

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def sanitize(text: str, allowed: str = "") -> str:
    """Replace every character that is neither printable nor in `allowed`."""
    return "".join(char if char.isprintable() or char in allowed else REPLACEMENT for char in text)


OUR_PACKAGES = ("node", "protocol", "optim")
SILENCED_LOGGERS = ("grpc._common",)  # logs a traceback for each malformed message; our own line is enough
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
    """Format a message, which may quote peers, as exactly one line; a traceback keeps its lines."""

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
        formatter = self._warning_formatters.get(record.levelno)
        return formatter.format(record) if formatter else super().format(record)


def configure_logs(as_json: bool) -> None:
    """Log our own packages from INFO, libraries from WARNING."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else PlainFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in OUR_PACKAGES:
        logging.getLogger(name).setLevel(logging.INFO)
    for name in SILENCED_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)

"""Configure logging, and sanitize text from peers and models before it reaches a terminal.

Text from a peer or a model must not control the terminal or forge a log line.

Log lines go to standard error: plain text for people, or one JSON object a line with --log-json. A plain line has the
time and the message, with the peers' names in place of their ids; a warning or an error also has its level. With
--verbose, a line keeps whole peer ids, a warning names its module, and the details of each round are logged too.
"""

import json
import logging
from types import TracebackType
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:  # `murmur --help` imports this module and must be fast
    from node.monitoring.peer_lines import PeerNames

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def sanitize(text: str, allowed: str = "") -> str:
    """Replace every character that is neither printable nor in `allowed`."""
    return "".join(char if char.isprintable() or char in allowed else REPLACEMENT for char in text)


INFO_FORMAT = "%(asctime)s %(message)s"
LEVEL_WORDS = {logging.WARNING: "warning", logging.ERROR: "error", logging.CRITICAL: "error"}
WARNING_FORMAT = "%(asctime)s {}: %(message)s"
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
    """Format a message, which may quote peers, as exactly one line; a traceback keeps its lines.

    `names` replaces peer ids; None keeps them.
    """

    def __init__(self, line_format: str, names: Optional["PeerNames"]) -> None:
        super().__init__(line_format, "%H:%M:%S")
        self._names = names

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        line = super().formatMessage(record)
        return sanitize(self._names.replace_ids(line) if self._names else line)

    def formatException(self, ei: ExceptionInfo) -> str:  # noqa: N802
        return sanitize(super().formatException(ei), "\n")


class PlainFormatter(LineFormatter):
    def __init__(self, names: Optional["PeerNames"] = None) -> None:
        super().__init__(INFO_FORMAT, names)
        module = "" if names else " [%(name)s]"
        self._warning_formatters = {
            level: LineFormatter(WARNING_FORMAT.format(word) + module, names) for level, word in LEVEL_WORDS.items()
        }

    def format(self, record: logging.LogRecord) -> str:
        formatter = self._warning_formatters.get(record.levelno)
        return formatter.format(record) if formatter else super().format(record)

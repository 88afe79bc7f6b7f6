"""Configure logging, and sanitize text from peers and models before it reaches a terminal.

Text from a peer or a model must not control the terminal or forge a log line.

Log lines go to standard error: plain text for people, or one JSON object a line with --log-json. A plain line has the
time and the message, with the peers' names in place of their ids; a warning or an error also has its level. With
--verbose, a line keeps whole peer ids, a warning names its module, and the details of each round are logged too.
"""

import json
import logging
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:  # `murmur --help` imports this module and must be fast
    from node.monitoring.display import Display
    from node.monitoring.peer_lines import LineLimit, PeerNames

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def sanitize(text: str, allowed: str = "") -> str:
    """Replace every character that is neither printable nor in `allowed`."""
    return "".join(char if char.isprintable() or char in allowed else REPLACEMENT for char in text)


OUR_PACKAGES = ("node", "protocol", "optim")
SILENCED_LOGGERS = ("grpc._common",)  # logs a traceback for each malformed message; our own line is enough
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


class _LogHandler(logging.Handler):
    """Write the lines to standard error, above the status line if one is shown, within the limits for peers."""

    def __init__(self, display: "Display", limit: "LineLimit") -> None:
        super().__init__()
        self._display = display
        self._limit = limit

    def emit(self, record: logging.LogRecord) -> None:
        try:
            for text in self._limit.summaries(record.created):
                summary = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (), None)
                self._display.write_line(self.format(summary))
            if self._limit.admits(record):
                self._display.write_line(self.format(record))
        except Exception:  # as every handler of the standard library does
            self.handleError(record)


def configure_logs(as_json: bool = False, verbose: bool = False) -> "Display":
    """Log our own packages from INFO (DEBUG if `verbose`), libraries from WARNING.

    Returns the display of standard error, which also shows the status line.
    """
    from node.monitoring.display import Display
    from node.monitoring.peer_lines import LineLimit

    display = Display(sys.stderr, has_line=not as_json)
    handler = _LogHandler(display, LineLimit())
    handler.setFormatter(JsonFormatter() if as_json else PlainFormatter(None if verbose else display.names))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in OUR_PACKAGES:
        logging.getLogger(name).setLevel(logging.DEBUG if verbose else logging.INFO)
    for name in SILENCED_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return display

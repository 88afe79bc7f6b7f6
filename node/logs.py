"""Log lines: for a person, or one JSON object a line with --log-json. They go to standard error.

A person is told what happens; where something is wrong, also how wrong, and which module says so.
"""

import json
import logging
import sys

OURS = ("node", "protocol", "optim")
TOLD = "%(asctime)s %(message)s"
WORDS = {logging.WARNING: "warning", logging.ERROR: "error", logging.CRITICAL: "error"}
WARNED = "%(asctime)s {}: %(message)s [%(name)s]"


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


class PlainFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__(TOLD, "%H:%M:%S")
        self._warned = {level: logging.Formatter(WARNED.format(word), "%H:%M:%S") for level, word in WORDS.items()}

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

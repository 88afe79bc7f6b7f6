"""Ask the person before a downloaded manifest may use something of this machine."""

import sys

from node.monitoring.logs import sanitize
from protocol.errors import UsageError


def require_consent(fact: str, option: str) -> None:
    """Ask whether to go on; `option` is the one that answers beforehand.

    Raises UsageError if the answer is no, or if there is no terminal to ask at.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"{sanitize(fact)} Allow it by {option}")
    print(f"{sanitize(fact)} Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError(f"you said no; {option} allows it")

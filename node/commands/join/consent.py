"""Ask the person before a downloaded manifest may use something of this machine, or read data from the internet."""

import re
import sys
from pathlib import Path

from node.monitoring.logs import sanitize
from protocol.errors import OrganiserError, UsageError
from protocol.manifest.sections import DataSection

HUB_NAME = re.compile(r"[\w][\w.-]{0,95}(/[\w][\w.-]{0,95})?", re.ASCII)


def require_consent(fact: str, option: str) -> None:
    """Ask whether to go on; `option` is the one that answers beforehand.

    Raises UsageError if the answer is no, or if there is no terminal to ask at.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"{sanitize(fact)} Allow it by {option}")
    print(f"{sanitize(fact)} Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError(f"you said no; {option} allows it")


def require_data_consent(data: DataSection, base: Path, is_allowed: bool) -> None:
    """Ask before a data set of a downloaded manifest is fetched from the hub; `base` is where its paths start.

    Raises OrganiserError for anything but the name of a data set, UsageError without consent.
    """
    streamed = [source for source in data.mixture if source.source == "hf" and not (base / source.path).is_dir()]
    for source in streamed:
        if not HUB_NAME.fullmatch(source.path):
            raise OrganiserError(
                f"{source.key}.path = {source.path[:80]!r} is not the name of a data set on the hub, and a downloaded "
                "manifest may name nothing else; ask the organiser for another manifest"
            )
    if streamed and not is_allowed:
        names = ", ".join(dict.fromkeys(source.path for source in streamed))
        noun = "data set" if len(streamed) == 1 else "data sets"
        require_consent(f"This run streams the {noun} {names} from the Hugging Face hub.", "--allow-data")

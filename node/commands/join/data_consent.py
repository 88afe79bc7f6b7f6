"""Let a downloaded manifest read data from the internet only with the person's consent."""

import re
from pathlib import Path

from node.commands.join.consent import require_consent
from protocol.errors import OrganiserError
from protocol.manifest.sections import DataSection

HUB_NAME = re.compile(r"[\w][\w.-]{0,95}(/[\w][\w.-]{0,95})?", re.ASCII)


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

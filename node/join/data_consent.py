"""Let a downloaded manifest read data from the internet only with the person's consent."""

import re
from pathlib import Path

from node.join.consent import require_consent
from protocol.errors import OrganiserError
from protocol.manifest import DataSection

HUB_NAME = re.compile(r"[\w][\w.-]{0,95}(/[\w][\w.-]{0,95})?", re.ASCII)


def require_data_consent(data: DataSection, base: Path, is_allowed: bool) -> None:
    """Ask before a data set of a downloaded manifest is fetched from the hub; `base` is where its paths start.

    Raises OrganiserError for anything but the name of a data set, UsageError without consent.
    """
    if data.source != "hf" or (base / data.path).is_dir():
        return
    if not HUB_NAME.fullmatch(data.path):
        raise OrganiserError(
            f"data.path = {data.path[:80]!r} is not the name of a data set on the hub, and a downloaded manifest may "
            "name nothing else; ask the organiser for another manifest"
        )
    if not is_allowed:
        require_consent(f"This run streams the data set {data.path} from the Hugging Face hub.", "--allow-data")

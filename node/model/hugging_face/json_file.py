"""Read a JSON object from a file of bounded size."""

import json
from pathlib import Path
from typing import Any, Final

from protocol.errors import ManifestError, MissingFileError

MAX_BYTES: Final = 2**20


def read_json_object(path: Path, advice: str) -> dict[str, Any]:
    """Return the object in a file; errors end in `advice`.

    Raises:
        MissingFileError: it cannot be read.
        ManifestError: it is too large, or not a JSON object.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise MissingFileError(f"cannot read {path}: {reason}; {advice}") from error
    try:
        values = json.loads(text) if len(text) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ManifestError(f"{path} is not a JSON object of at most {MAX_BYTES} bytes; {advice}")
    return values

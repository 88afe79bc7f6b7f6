"""Read and check manifests; every error is one line that says what to fix."""

import json
import tomllib
from pathlib import Path
from typing import Any

from pydantic import (
    ValidationError,
)

from protocol.errors import ManifestError, MissingFileError
from protocol.manifest.faults import ManifestText, decode_text, describe_invalid_values, describe_toml_fault
from protocol.manifest.run import Manifest

MAX_MANIFEST_BYTES = 64 * 1024
MAX_DOTS_PER_LINE = 500  # because the time to parse a dotted key grows with the square of its parts


def load_manifest(path: Path) -> Manifest:
    """Read a manifest from a file.

    Raises MissingFileError or ManifestError, one line that says what to fix.
    """
    return parse_manifest(read_manifest_bytes(path, MAX_MANIFEST_BYTES), str(path))


def read_manifest_bytes(path: Path, limit: int) -> bytes:
    """Read a file that may be a pipe, once, and at most one byte more than `limit`.

    Raises MissingFileError.
    """
    try:
        with path.open("rb") as file:
            return file.read(limit + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise MissingFileError(f"cannot read the manifest {path}: {reason}; name an existing file") from error


def parse_manifest(text: bytes, origin: str) -> Manifest:
    """Parse and check a manifest; `origin` names the text in errors."""
    return validate_manifest(*parse_manifest_values(text, origin))


def parse_manifest_values(text: bytes, origin: str) -> tuple[dict[str, Any], ManifestText]:
    """Parse a manifest's TOML without checking its values. Raises ManifestError."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"{origin}: a manifest has at most {MAX_MANIFEST_BYTES} bytes; shorten it")
    decoded = decode_text(text, origin)
    try:
        if any(line.count(".") > MAX_DOTS_PER_LINE for line in decoded.text.splitlines()):
            raise ValueError(f"more than {MAX_DOTS_PER_LINE} dots on a line")
        return tomllib.loads(decoded.text), decoded
    except RecursionError as error:
        raise decoded.fault("not valid TOML: nested too deeply") from error
    except ValueError as error:  # not TOML, a number of thousands of digits
        raise decoded.fault(f"not valid TOML: {describe_toml_fault(error)}") from error


def validate_manifest(values: dict[str, Any], text: ManifestText) -> Manifest:
    """Check the values of a manifest; `text` names it, and the line of a key, in errors. Raises ManifestError."""
    try:
        # JSON mode lets arrays become tuples while every scalar stays strict.
        manifest = _validate(json.dumps(values, default=_refuse_date), text)
        _require_usable_weights(manifest, text)
        return manifest
    except RecursionError as error:
        raise text.fault("not valid TOML: nested too deeply") from error
    except ValueError as error:
        raise text.fault(f"not valid TOML: {error}") from error


def _require_usable_weights(manifest: Manifest, text: ManifestText) -> None:
    """Raise ManifestError for weights of sources that would never hold. A revision of a running run may make such."""
    data, target = manifest.data, manifest.target
    names = [source.name for source in data.sources]
    if data.weights is not None and sorted(data.weights) != sorted(names):
        raise text.fault_at(("data", "weights"), f"must name each source: {', '.join(names) or 'there is only one'}")
    for number, phase in enumerate(data.phases):
        if phase.share is not None and target.tokens is target.rounds is None:
            reason = "is a share of the target, which is missing; add target.tokens"
            raise text.fault_at(("data", "phases", str(number), "share"), reason)


def manifest_of_values(values: dict[str, Any], origin: str) -> Manifest:
    """Check the values of a manifest that a program has changed; `origin` names them in errors."""
    return validate_manifest(values, ManifestText(origin, ""))


def _validate(values: str, text: ManifestText) -> Manifest:
    try:
        return Manifest.model_validate_json(values)
    except ValidationError as error:
        raise describe_invalid_values(error, Manifest, text) from error


def _refuse_date(value: object) -> str:
    raise ValueError(f"no key takes a date or time; put {value} in quotes")

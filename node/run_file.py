"""Read a manifest whose [model] names a config.json, or a folder of weights, instead of single keys.

Only a file that a user names may do so. The manifest that peers get has the keys and the hashes of the weights. In the
same way `method.modules` of such a file may name modules without the SHA-256 of their sources.
"""

import logging
from pathlib import Path
from typing import Any, Final

from node.own_modules import complete_line
from protocol.manifest.model import CUSTOM_KIND, ModelSection, format_tensor
from protocol.manifest.reading import ManifestText, parse_manifest_values, read_manifest_bytes, validate_manifest
from protocol.signing import MAX_SIGNED_MANIFEST_BYTES, SignedManifest, open_signed_manifest

logger = logging.getLogger(__name__)

SIGNATURE: Final = b"# signature "
# Keys that are allowed together with a config.json.
BESIDE_FILES: Final = ("config", "from", "context", "subspace", "document_end")


def load_run_file(path: Path) -> SignedManifest:
    """Read a manifest that a user names, and verify its signature if it has one.

    Raises MurmurError, one line that says what to fix.
    """
    text = read_manifest_bytes(path, MAX_SIGNED_MANIFEST_BYTES)
    return parse_run_text(text, str(path), path.parent.resolve() if path.is_file() else Path.cwd())


def parse_run_text(text: bytes, origin: str, base: Path) -> SignedManifest:
    """Read the text of a manifest as `load_run_file`, with relative paths from `base`. Raises MurmurError."""
    if SIGNATURE in text:
        return open_signed_manifest(text, origin)
    values, decoded = parse_manifest_values(text, origin)
    has_modules = _complete_modules(values.get("method"))
    if not _names_files(values.get("model")):
        if has_modules:
            return SignedManifest(validate_manifest(values, decoded), None, None, decoded)
        return open_signed_manifest(text, origin)
    _expand(values, decoded, base)
    return SignedManifest(validate_manifest(values, decoded), None, None, decoded)


def _complete_modules(method: object) -> bool:
    """Add the hashes of the sources to the names of modules; return whether one lacked its hash."""
    lines = method.get("modules") if isinstance(method, dict) else None
    if not isinstance(method, dict) or not isinstance(lines, list) or not all(isinstance(each, str) for each in lines):
        return False
    complete = [complete_line(line) for line in lines]
    method["modules"] = complete
    return complete != lines


def _names_files(model: object) -> bool:
    if not isinstance(model, dict):
        return False
    return "config" in model or isinstance(model.get("tensors"), str) or ("from" in model and "weights" not in model)


def _expand(values: dict[str, Any], text: ManifestText, base: Path) -> None:
    """Replace `model.config` and `model.from` by the keys and hashes that they stand for."""
    from node.model.config_file import CONFIG_FILE, read_config  # loads torch
    from node.model.weight_files import weights_folder

    model: dict[str, Any] = values["model"]
    for key in ("config", "from"):
        if not isinstance(model.get(key, ""), str):
            raise text.fault_at(("model", key), "must be text")
    if model.get("kind") == CUSTOM_KIND and "config" not in model:
        _expand_custom(values, text, base)
        return
    if "config" in model and "from" in model:
        raise text.fault_at(("model", "config"), f"model.from has its own {CONFIG_FILE}; remove one of the two")
    if "from" in model and "subspace" in model:
        raise text.fault_at(
            ("model", "subspace"), "cannot be combined with pretrained weights; remove it, or model.from"
        )
    if more := [key for key in model if key not in BESIDE_FILES]:
        raise text.fault_at(("model", more[0]), f"comes from {CONFIG_FILE}; remove this key")
    source = model.pop("from", None)
    folder = weights_folder(source, base) if source is not None else None
    found = read_config(folder / CONFIG_FILE if folder else base / model.pop("config"))
    wanted, largest = model.get("context"), found["context"]
    if isinstance(wanted, int) and isinstance(largest, int) and wanted > largest:
        raise text.fault_at(("model", "context"), f"{CONFIG_FILE} has {largest}; write at most that")
    values["model"] = found | model
    if folder is not None:
        values["model"] |= {"from": source, "weights": _hashes(values, text, folder)}


def _expand_custom(values: dict[str, Any], text: ManifestText, base: Path) -> None:
    """Replace the names of files by the lines and hashes that they stand for."""
    from node.model.custom import read_tensor_file  # loads torch
    from node.model.weight_files import read_shapes, weights_folder

    model: dict[str, Any] = values["model"]
    if isinstance(model.get("tensors"), str):
        model["tensors"] = read_tensor_file(base / Path(model["tensors"]).expanduser())
    if "from" not in model or "weights" in model:
        return
    source = model.pop("from")
    folder = weights_folder(source, base)
    if "tensors" not in model:
        model["tensors"] = [format_tensor(name, shape) for name, shape in read_shapes(folder)]
    model["weights"] = [64 * "0"] * len(model["tensors"])  # makes first values needless
    model |= {"weights": _hashes(values, text, folder), "from": source}


def _hashes(values: dict[str, Any], text: ManifestText, folder: Path) -> list[str]:
    from node.model.weight_files import WeightFiles

    whole = {table: value for table, value in values.items() if table != "adapter"}  # which needs the hashes
    config: ModelSection = validate_manifest(whole, text).model  # sizes of others decide what is read
    logger.info("reading the weights in %s", folder)
    with WeightFiles(folder, config) as files:
        return list(files.digests())

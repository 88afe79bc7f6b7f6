"""The organiser's file of names and shapes, in the form of a safetensors header with first values.

    {"layer.weight": {"dtype": "F32", "shape": [64, 32], "first": "normal 0.02"}, ...}

Nothing is read but these three keys. The order in the file is that of the flat vector.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from node.model.hugging_face.config_file import join_faults
from node.model.hugging_face.json_file import read_json_object
from protocol.errors import ManifestError
from protocol.fault_words import shorten
from protocol.manifest.model import format_tensor, parse_tensor

METADATA: Final = "__metadata__"
TRAINED_TYPE: Final = "F32"


def read_tensor_file(path: Path) -> list[str]:
    """Return the lines of `model.tensors` that a file stands for.

    Raises:
        MissingFileError: it cannot be read.
        ManifestError: one line that names each tensor that cannot be used.
    """
    entries = read_json_object(path, "write it by murmuration.describe")
    entries.pop(METADATA, None)
    faults = [fault for name, entry in entries.items() if (fault := _fault(name, entry))]
    if not entries:
        faults = ["it names no tensor"]
    if faults:
        raise ManifestError(f"{path}: {join_faults(faults)}")
    return [format_tensor(name, entry["shape"], entry.get("first", "")) for name, entry in entries.items()]


def to_text(tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> str:
    """Return the text of a file with shapes and first values, by name."""
    lines = (
        f"  {json.dumps(name)}: {json.dumps({'dtype': TRAINED_TYPE, 'shape': list(shape), 'first': first})}"
        for name, (shape, first) in tensors.items()
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _fault(name: str, entry: Any) -> str:
    return next(_faults(name, entry), "")


def _faults(name: str, entry: Any) -> Iterator[str]:
    shown = shorten(name)
    if not isinstance(entry, dict) or not isinstance(entry.get("shape"), list):
        yield f"{shown} has no shape"
        return
    if entry.get("dtype", TRAINED_TYPE) != TRAINED_TYPE:
        yield f"{shown} has the type {shorten(str(entry['dtype']))}; parameters are F32, and autocast computes in less"
    if not all(type(size) is int for size in entry["shape"]) or not isinstance(entry.get("first", ""), str):
        yield f"{shown} has a shape or first values of the wrong type"
        return
    try:
        parse_tensor(format_tensor(name, entry["shape"], entry.get("first", "")))
    except ValueError as error:
        yield str(error)

"""Small data sets for tests."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from node.data import open_corpus
from node.data.corpus import SourceText, WindowNumbers
from protocol.manifest.sections import DataSection

SHARE = 0.2


def hf_config(path: str = "set", share: float = SHARE, **values: object) -> DataSection:
    """Return the configuration of a streamed data set."""
    return DataSection.model_validate({"source": "hf", "path": path, "validation_share": share, **values})


def write_rows(file: Path, rows: Iterable[object]) -> None:
    """Write JSON lines; a row of bytes is written as it is."""
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows) + b"\n")


def open_only(config: DataSection, base: Path) -> SourceText:
    """Open the only source of a run."""
    (source,) = open_corpus(config, base).sources
    return source


def numbers(count: int, first: int = 0) -> WindowNumbers:
    """Return numbers of windows."""
    return np.arange(first, first + count, dtype=np.uint64)

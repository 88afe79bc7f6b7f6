"""Files to which a node adds lines for as long as it lives."""

import contextlib
import os
from pathlib import Path


def append_bounded(path: Path, text: str, max_bytes: int) -> None:
    """Add text to a file, in one write; one that is too long becomes NAME.1.SUFFIX first. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size >= max_bytes:
            os.replace(path, older_file(path))
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def older_file(path: Path) -> Path:
    """Return the place of the lines that were in the file before it became too long."""
    return path.with_suffix(f".1{path.suffix}")

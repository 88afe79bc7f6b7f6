"""Write small files durably and atomically: a reader sees the old content or the new one, even after a power cut."""

import os
import tempfile
from pathlib import Path

from protocol.errors import StorageError


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file's content, or create the file.

    Raises:
        StorageError: The file could not be written; the old content is unchanged.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; free some space or choose another --dir") from error


def create_atomically(path: Path, data: bytes) -> None:
    """Create a file that only its owner can read, and the folders above it.

    Raises FileExistsError if the file exists, and OSError if it cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as file:  # created with mode 0600
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        os.link(file.name, path)  # unlike a rename, this fails if another process was faster
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

"""List, protect and prune the folders of checkpoints; their names count saves, not rounds."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from node.paths import KEEP_MARK
from protocol.files import write_atomically

MANIFEST = "manifest.json"
NAME = re.compile(r"(\d{10,})\.round-(\d+)")


def keep_newest(folder: Path) -> None:
    """Protect the newest checkpoint from pruning, unless one is protected already. Raises StorageError."""
    saved = list_saved(folder)
    if saved and not any(_keep_mark(path).exists() for _, path in saved):
        write_atomically(_keep_mark(saved[-1][1]), b"")


def release_kept(folder: Path) -> None:
    """Let the next save prune all checkpoints again."""
    for mark in folder.glob("*.round-*.keep"):
        mark.unlink(missing_ok=True)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk; `is_kept` if it is protected from pruning."""

    path: Path
    round: int
    is_kept: bool


def list_checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """Return the checkpoints in a folder, oldest first."""
    names = [(path, NAME.fullmatch(path.name)) for _, path in list_saved(folder)]
    return [SavedCheckpoint(path, int(name[2]), _keep_mark(path).exists()) for path, name in names if name]


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder has the name and the manifest of a checkpoint."""
    return NAME.fullmatch(path.name) is not None and (path / MANIFEST).is_file()


def list_saved(folder: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints' numbers and folders, oldest first."""
    if not folder.is_dir():
        return []
    names = ((NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(name[1]), path) for name, path in names if name)


def next_number(folder: Path) -> int:
    """Return the number of the next save."""
    saved = list_saved(folder)
    return saved[-1][0] + 1 if saved else 1


def prune(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the newest `keep`, and those that are protected."""
    for _, path in list_saved(folder)[:-keep]:
        if _keep_mark(path).exists():
            continue
        hidden = path.with_name(f".{path.name}")  # a half-deleted one must not look like a checkpoint
        path.rename(hidden)
        shutil.rmtree(hidden)


def _keep_mark(path: Path) -> Path:
    """Return the file whose presence protects a checkpoint."""
    return path.with_name(path.name + KEEP_MARK)


def remove_hidden(folder: Path) -> None:
    """Remove the leftovers of an interrupted save or prune."""
    for path in folder.glob(".*.round-*"):
        if path.is_dir():
            shutil.rmtree(path)

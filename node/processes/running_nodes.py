"""Remember which nodes of this user run, so that `murmur status` finds each one wherever its folder is.

Each running node has a file in ~/.local/state/murmur/running (or below $XDG_STATE_HOME) with the path of its folder.
The file of a node that was killed stays; `murmur status` removes it. A machine where the file cannot be written runs
nodes all the same.
"""

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from node.paths import state_home
from node.run_dir import is_locked, write_atomically
from protocol.errors import StorageError, UsageError

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def registered(folder: Path) -> Iterator[None]:
    """Keep a node's folder in the registry while the node runs."""
    try:
        entry = _entry_of(folder.resolve())
        entry.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_vanished(entry.parent)
        write_atomically(entry, os.fsencode(folder.resolve()))
    except (OSError, StorageError, UsageError) as error:
        logger.debug("`murmur status` will need the folder of this node, because it cannot be noted: %s", error)
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            entry.unlink(missing_ok=True)


def running_dirs() -> list[Path]:
    """Return the folders of the nodes that run, and remove the entries of those that no longer do."""
    try:
        entries = sorted((state_home() / "running").glob("[!.]*"))
    except (OSError, UsageError):
        return []
    found = []
    for entry in entries:
        with contextlib.suppress(OSError):
            folder = Path(os.fsdecode(entry.read_bytes()))
            if is_locked(folder):
                found.append(folder)
            else:
                entry.unlink(missing_ok=True)
    return sorted(found)


def _remove_vanished(registry: Path) -> None:
    """Remove the entries of folders that no longer exist, so that killed nodes do not fill the registry."""
    for entry in registry.glob("[!.]*"):
        with contextlib.suppress(OSError):
            if not Path(os.fsdecode(entry.read_bytes())).exists():
                entry.unlink(missing_ok=True)


def _entry_of(folder: Path) -> Path:
    return state_home() / "running" / hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]

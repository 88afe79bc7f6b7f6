"""Fill a new folder for a person: an export, or token shards.

The folder is filled in place, because a mount point, the current folder and a folder in a parent that belongs to
someone else cannot be replaced by a rename. While it is filled it holds the file INCOMPLETE; the one
file without which nothing reads the folder is written last.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import StorageError, UsageError

INCOMPLETE = ".incomplete"
OF_THE_FILE_SYSTEM = "lost+found"  # in each new file system


@contextlib.contextmanager
def fill_folder(out: Path) -> Iterator[Path]:
    """Yield `out`, new or empty, to write into; after an error or an interrupt, remove all that was written.

    Raises:
        UsageError: `out` is not an empty folder.
        StorageError: it cannot be written.
    """
    folder = Path(os.path.realpath(out))  # a link to a folder stays; its target is filled
    with _blame_storage(out):
        if os.path.lexists(folder) and (not folder.is_dir() or _entries(folder)):
            raise UsageError(f"{out} exists and is not an empty folder; name a new one")
        created = _create(folder)
        try:
            yield folder
            (folder / INCOMPLETE).unlink()
        except BaseException:
            _remove(folder, created)
            raise


def require_free(out: Path) -> None:
    """Raise UsageError unless `out` is a new or an empty folder; before work that would be lost."""
    with _blame_storage(out):
        if os.path.lexists(out) and not (out.is_dir() and not _entries(out)):
            raise UsageError(f"{out} exists and is not an empty folder; name a new one")


def _entries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name != OF_THE_FILE_SYSTEM]


def _create(folder: Path) -> list[Path]:
    """Create a folder with its parents and the mark in it; return the new folders, the outermost first."""
    created: list[Path] = []
    try:
        for path in (*reversed(folder.parents), folder):
            if not path.exists():
                path.mkdir()
                created.append(path)
        (folder / INCOMPLETE).touch(exist_ok=False)  # only one process fills a folder
    except OSError:
        _remove_empty(created)
        raise
    return created


def _remove(folder: Path, created: list[Path]) -> None:
    with contextlib.suppress(OSError):  # the first error is the one to report
        for path in _entries(folder):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    _remove_empty(created)


def _remove_empty(folders: list[Path]) -> None:
    with contextlib.suppress(OSError):
        for path in reversed(folders):
            path.rmdir()


@contextlib.contextmanager
def _blame_storage(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some space or name another folder" if is_full else "name another folder"
        raise StorageError(f"cannot write {out}: {error.strerror}; {advice}") from error

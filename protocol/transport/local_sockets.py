"""The private folder of a node's Unix sockets.

A Unix socket's path may have 107 bytes, fewer than many a node's own folder, so the sockets live in a short temporary
folder that only its owner may enter. The node's folder holds a link to it: after a SIGKILL the next start finds the
old one by that link and removes it. Who uses it holds a lock on it, which the kernel drops with the process.

A port of ours that another program has for a moment: an outgoing connection of its own, or a process that is dying.

It is tried for some seconds more: others know us by it.
"""

import asyncio
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self, TypeVar

from protocol.errors import AlreadyRunningError, PortTakenError, StorageError

logger = logging.getLogger(__name__)

LINK_NAME = "sockets"
PREFIX = "murmur-"
MAX_ROOT_BYTES = 40  # leaves 60 of a socket's 107 bytes for the folder's and the socket's own names


class SocketFolder:
    """`path` has mode 0700 and is gone after `remove`."""

    def __init__(self, path: Path, link: Path, lock: int) -> None:
        self.path = path
        self._link = link
        self._lock = lock

    @classmethod
    def create(cls, node_folder: Path) -> Self:
        """AlreadyRunningError: a living process uses this node folder. StorageError: no folder can be made."""
        link = node_folder / LINK_NAME
        try:
            node_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_stale(link)
            path, lock = _create_linked_folder(link)
        except FileExistsError as error:
            raise _in_use_error(link) from error
        except OSError as error:
            message = f"cannot make the socket folder of {node_folder}: {error.strerror}; free or open that place"
            raise StorageError(message) from error
        return cls(path, link, lock)

    def remove(self) -> None:
        self._link.unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _create_linked_folder(link: Path) -> tuple[Path, int]:
    """A new folder, and our lock on it. FileExistsError: another process was faster. Leaves nothing where it fails."""
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_temporary_root()))
    with ExitStack() as undoing:
        undoing.callback(shutil.rmtree, path, ignore_errors=True)
        lock = _lock_folder(path)
        undoing.callback(os.close, lock)
        link.symlink_to(path)
        undoing.pop_all()
    return path, lock


def _temporary_root() -> str:
    root = tempfile.gettempdir()
    return root if len(os.fsencode(root)) <= MAX_ROOT_BYTES else "/tmp"


def _lock_folder(path: Path) -> int:
    """BlockingIOError where another process holds it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _in_use_error(link: Path) -> AlreadyRunningError:
    return AlreadyRunningError(f"a running node uses {link.parent}; stop it, or name another folder")


def _remove_stale(link: Path) -> None:
    if not link.is_symlink():
        if link.exists():
            raise StorageError(f"{link} is no link, as in a copy of a run's folder; remove it, it holds nothing of use")
        return
    target = link.readlink()
    try:
        lock = _lock_folder(target)
    except BlockingIOError as error:
        raise _in_use_error(link) from error
    except FileNotFoundError:  # a restart of the machine empties the temporary folder
        link.unlink()
        return
    if target.name.startswith(PREFIX):
        logger.info("removing the sockets that an earlier process left in %s", target)
        shutil.rmtree(target, ignore_errors=True)
    os.close(lock)
    link.unlink()


PORT_RETRY_SECONDS = 10.0
PORT_RETRY_INTERVAL_SECONDS = 0.25

Claimed = TypeVar("Claimed")


async def retry_while_port_taken(claim: Callable[[], Awaitable[Claimed]]) -> Claimed:
    """What `claim` returns. While it raises PortTakenError it is called again, until PATIENCE seconds have passed."""
    loop = asyncio.get_running_loop()
    until, said = loop.time() + PORT_RETRY_SECONDS, False
    while True:
        try:
            return await claim()
        except PortTakenError as error:
            if loop.time() >= until:
                raise
            if not said:
                logger.warning("%s; it is tried again for %g s", error, PORT_RETRY_SECONDS)
            said = True
        await asyncio.sleep(PORT_RETRY_INTERVAL_SECONDS)

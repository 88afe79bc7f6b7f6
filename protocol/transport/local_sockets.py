"""The private folder of a node's Unix sockets, and retries while a port is taken.

The path of a Unix socket is limited to 107 bytes, less than the path of many a node's folder, so the sockets live in a
short temporary folder that only its owner may enter. The node's folder holds a link to it: after a SIGKILL the next
start follows that link and removes the old sockets. The running node holds a lock on the temporary folder, which the
kernel releases with the process.

Another program may hold a node's port for a moment: as the source port of an outgoing connection, or because it is a
process that is still exiting. The node retries for some seconds instead of choosing another port, because other peers
know it by this one.
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
    """A node's socket folder, owned by its transport.

    `path` has mode 0700 and is gone after `remove`.
    """

    def __init__(self, path: Path, link: Path, lock: int) -> None:
        self.path = path
        self._link = link
        self._lock = lock

    @classmethod
    def create(cls, node_folder: Path) -> Self:
        """Create the folder, removing one left by a dead process.

        Raises:
            AlreadyRunningError: A running process uses this node folder.
            StorageError: The folder cannot be created.
        """
        link = node_folder / LINK_NAME
        try:
            node_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_stale(link)
            path, lock = _create_linked_folder(link)
        except FileExistsError as error:
            raise _in_use_error(link) from error
        except OSError as error:
            message = f"cannot create the socket folder of {node_folder}: {error.strerror}; free or open that path"
            raise StorageError(message) from error
        return cls(path, link, lock)

    def remove(self) -> None:
        self._link.unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _create_linked_folder(link: Path) -> tuple[Path, int]:
    """Create a temporary folder, lock it and link to it.

    A failure leaves nothing; FileExistsError means that another process won.
    """
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_temporary_root()))
    with ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, path, ignore_errors=True)
        lock = _lock_folder(path)
        cleanup.callback(os.close, lock)
        link.symlink_to(path)
        cleanup.pop_all()
    return path, lock


def _temporary_root() -> str:
    root = tempfile.gettempdir()
    return root if len(os.fsencode(root)) <= MAX_ROOT_BYTES else "/tmp"


def _lock_folder(path: Path) -> int:
    """Lock a folder and return its descriptor.

    Raises BlockingIOError if another process holds the lock.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _in_use_error(link: Path) -> AlreadyRunningError:
    return AlreadyRunningError(f"a running node uses {link.parent}; stop it or choose another folder")


def _remove_stale(link: Path) -> None:
    if not link.is_symlink():
        if link.exists():
            raise StorageError(f"{link} is not a link, as in a copy of a run's folder; remove it, it is not needed")
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
        logger.debug("removing the sockets that an earlier process left in %s", target)
        shutil.rmtree(target, ignore_errors=True)
    os.close(lock)
    link.unlink()


PORT_RETRY_SECONDS = 10.0
PORT_RETRY_INTERVAL_SECONDS = 0.25

Bound = TypeVar("Bound")


async def retry_while_port_taken(bind: Callable[[], Awaitable[Bound]]) -> Bound:
    """Return the result of `bind`, retrying while it raises PortTakenError.

    Gives up after PORT_RETRY_SECONDS.
    """
    loop = asyncio.get_running_loop()
    deadline, warned = loop.time() + PORT_RETRY_SECONDS, False
    while True:
        try:
            return await bind()
        except PortTakenError as error:
            if loop.time() >= deadline:
                raise
            if not warned:
                logger.warning("%s; trying again for %g s", error, PORT_RETRY_SECONDS)
            warned = True
        await asyncio.sleep(PORT_RETRY_INTERVAL_SECONDS)

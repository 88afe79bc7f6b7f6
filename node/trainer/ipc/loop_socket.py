"""The Unix socket in a node's folder at which a training loop meets its daemon.

A loop that connects gets one byte with the descriptors of the shared memory, and afterwards the messages of
`channel`. The folder belongs to the user alone, and so does the socket. Its path may be longer than the 107
bytes that the system allows: both sides go through a descriptor of the folder.
"""

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

NAME: Final = "loop.sock"
GREETING: Final = b"m"
GREETING_SECONDS: Final = 30.0
MAX_FDS: Final = 2  # the memory, and a file on disk


def listen(folder: Path) -> socket.socket:
    """Return a listening socket in the folder, in place of one that a killed daemon left. Raises OSError."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short_path(folder) as path:
            path.unlink(missing_ok=True)
            listening.bind(str(path))
            path.chmod(0o600)
        listening.listen(1)
    except OSError:
        listening.close()
        raise
    return listening


def send_memory(connection: socket.socket, memory_fds: Sequence[int]) -> None:
    """Give the loop the shared memory. Raises OSError if it is gone."""
    connection.settimeout(GREETING_SECONDS)
    socket.send_fds(connection, [GREETING], list(memory_fds))


def connect(folder: Path, seconds: float = GREETING_SECONDS) -> tuple[socket.socket, list[int]]:
    """Connect to the daemon of a folder; return the connection and the descriptors of the shared memory.

    Raises OSError if no daemon listens there, and TimeoutError if it serves another loop.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        with _short_path(folder) as path:
            connection.connect(str(path))
        greeting, memory_fds, _, _ = socket.recv_fds(connection, len(GREETING), MAX_FDS)
        if not memory_fds:
            raise ConnectionResetError("the daemon ended while the loop connected")
    except OSError:
        connection.close()
        raise
    return connection, memory_fds


@contextlib.contextmanager
def _short_path(folder: Path) -> Iterator[Path]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        short = Path(f"/proc/self/fd/{descriptor}")
        yield (short if short.exists() else folder) / NAME
    finally:
        os.close(descriptor)

"""Let a training loop of the user take the place of the trainer (`--own-loop`, `murmuration.join`).

The loop may be started and killed as often as the user likes: it is neither restarted nor killed by a watchdog, and its
end does not count as a crash.

It meets the daemon at a Unix socket in the node's folder. A loop that connects gets one byte with the descriptors of
the shared memory, and afterwards the messages of `channel`. The folder belongs to the user alone, and so does the
socket. Its path may be longer than the 107 bytes that the system allows, so both sides open it through a descriptor of
the folder.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.trainer.ipc.channel import ChannelClosed, DaemonChannel, PauseChanged, TrainerConfig
from node.trainer.ipc.shared_memory import SharedMemory
from node.trainer.ipc.trainer_process import STOP_SECONDS, TrainerProcess, TrainerRun
from protocol.errors import StorageError

logger = logging.getLogger(__name__)

FIRST_LOOP: Final = "waiting for your training loop"
NO_LOOP: Final = "no training loop is connected; start your script"
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
    """Pass the shared memory to a loop. Raises OSError if the loop is gone."""
    connection.settimeout(GREETING_SECONDS)
    socket.send_fds(connection, [GREETING], list(memory_fds))


def connect_loop(folder: Path, seconds: float = GREETING_SECONDS) -> tuple[socket.socket, list[int]]:
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


@dataclass(frozen=True)
class _LoopRun(TrainerRun):
    """The connection of one loop; its process belongs to the user."""

    @property
    def pid(self) -> None:
        return None

    def kill(self) -> None:
        self.channel.abort()

    async def wait(self) -> str:
        return "the training loop has ended"


class OwnLoopProcess(TrainerProcess):
    """Accepts one training loop after another at the socket in the node's folder."""

    def __init__(self, shared_memory: SharedMemory, config: TrainerConfig, folder: Path) -> None:
        super().__init__(shared_memory, config)
        self._folder = folder
        self._listening: socket.socket | None = None
        self.not_running_reason = FIRST_LOOP
        self._is_connected = False

    @property
    def is_absent(self) -> bool:
        """Whether no loop is connected; the rounds continue without one, and the next loop gets the newest anchor."""
        return not self._is_connected

    async def start(self) -> None:
        """Listen for loops. Raises StorageError if the folder takes no socket."""
        try:
            self._listening = listen(self._folder)
        except OSError as error:
            raise StorageError(f"cannot listen in {self._folder}: {error.strerror}; choose another --dir") from error
        self._listening.setblocking(False)
        self._supervisor = asyncio.create_task(self._supervise(None), name="own loop")

    async def stop(self, timeout_seconds: float = STOP_SECONDS) -> None:
        self._stopping = True
        if self._run is None:
            await self._clean_up()
        else:
            await super().stop(timeout_seconds)
        if self._listening is not None:
            self._listening.close()

    async def _spawn(self) -> TrainerRun:
        assert self._listening is not None
        await self._queue.put(PauseChanged(reason=self.not_running_reason))  # or peers wait for us
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(self._listening)
            async with self.handing_over:
                try:
                    send_memory(connection, self._shared_memory.fds)
                except OSError as error:
                    logger.info("a training loop went away while it connected: %s", error)
                    connection.close()
                    continue
                run = _LoopRun(await DaemonChannel.open(connection))
                self._is_connected = True
                with contextlib.suppress(ChannelClosed):  # gone already: `receive` will notice
                    await run.channel.send(self._current_config)
            return run

    async def _kill_if_stuck(self, run: TrainerRun) -> None:
        """Never kill: a user's loop may pause for as long as it likes, for example to evaluate."""
        await asyncio.Event().wait()

    def _record_crash(self, cause: str) -> None:
        self.crash_count += 1
        self._is_connected = False
        self._crash = None
        self.not_running_reason = NO_LOOP
        logger.info("%s; this node stays in the run and waits for the next one", cause)

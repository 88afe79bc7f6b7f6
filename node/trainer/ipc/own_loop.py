"""Wait for a training loop that is not ours, and for the next one when it ends; otherwise it is like our trainer.

The loop is a script of the user (`murmuration.join`). It may be started and killed as often as the user likes: nothing
counts as a crash in a row, nothing restarts it, and no watchdog ends it.
"""

import asyncio
import contextlib
import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.trainer.ipc import loop_socket
from node.trainer.ipc.channel import DaemonChannel, PauseChanged, TrainerConfig
from node.trainer.ipc.frames import ChannelClosed
from node.trainer.ipc.shared_memory import SharedMemory
from node.trainer.ipc.trainer_process import STOP_SECONDS, TrainerProcess
from node.trainer.ipc.trainer_run import TrainerRun
from protocol.errors import StorageError

FIRST_LOOP: Final = "waiting for your training loop"
NO_LOOP: Final = "no training loop is connected; start your script"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _LoopRun:
    """The connection of one loop; its process belongs to the user."""

    channel: DaemonChannel
    pid: None = None

    def kill(self) -> None:
        self.channel.abort()

    async def wait(self) -> str:
        return "the training loop has ended"


class OwnLoopProcess(TrainerProcess):
    """A trainer that comes by itself, at the socket in the node's folder."""

    def __init__(self, shared_memory: SharedMemory, config: TrainerConfig, folder: Path) -> None:
        super().__init__(shared_memory, config)
        self._folder = folder
        self._listening: socket.socket | None = None
        self.not_running_reason = FIRST_LOOP
        self._is_connected = False

    @property
    def is_absent(self) -> bool:
        """Return whether no loop has the memory; then the rounds go on, and the next loop gets the newest anchor."""
        return not self._is_connected

    async def start(self) -> None:
        """Listen for loops. Raises StorageError if the folder takes no socket."""
        try:
            self._listening = loop_socket.listen(self._folder)
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
        await self._queue.put(PauseChanged(reason=self.not_running_reason))  # nobody waits for our contributions
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(self._listening)
            async with self.handing_over:
                try:
                    loop_socket.send_memory(connection, self._shared_memory.fds)
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
        """Wait for ever: a loop of the user may pause for as long as it likes, for example to evaluate."""
        await asyncio.Event().wait()

    def _record_crash(self, cause: str) -> None:
        self.crash_count += 1
        self._is_connected = False
        self._crash = None
        self.not_running_reason = NO_LOOP
        logger.info("%s; this node stays in the run and waits for the next one", cause)

"""One trainer from its start to its end: a process that the daemon spawned, or one that a user started."""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from node.trainer.ipc.channel import DaemonChannel


class TrainerRun(Protocol):
    """One trainer, from its start to its end."""

    @property
    def channel(self) -> DaemonChannel:
        """Return our end of its channel."""

    @property
    def pid(self) -> int | None:
        """Return the id of its process while that runs; `None` for a process that is not ours."""

    def kill(self) -> None:
        """End it at once."""

    async def wait(self) -> str:
        """Wait for its end; return how it ended."""


@dataclass(frozen=True)
class SpawnedRun:
    """A process that the daemon spawned."""

    process: asyncio.subprocess.Process
    channel: DaemonChannel
    stderr_task: asyncio.Task[None]

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process.returncode is None else None

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()

    async def wait(self) -> str:
        code = await self.process.wait()
        await self.stderr_task
        return _describe_exit(code)


def _describe_exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"

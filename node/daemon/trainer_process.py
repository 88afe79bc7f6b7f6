"""The daemon's side of the trainer: spawn it, listen to it, start it again when it dies.

A trainer that dies comes back from the arena, after a growing pause; one that is stuck is killed first. It is given up,
with its last words, when it says Failed itself or has died MAX_DEATHS times in a row without making progress.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from node.arena import Arena
from node.channel import (
    ChannelClosed,
    Config,
    DaemonEnd,
    Failed,
    FromTrainer,
    Message,
    Progress,
    Ready,
    Stop,
    ToTrainer,
)
from node.daemon.watchdog import LOOK_SECONDS, Watchdog
from protocol import errors
from protocol.errors import MalformedError, MurmurError

logger = logging.getLogger(__name__)
MAX_DEATHS = 5
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
STOP_SECONDS = 20.0
QUEUE_MESSAGES = 256
LAST_WORDS_LINES = 20
LINE_BYTES = 2000
# Every library that has threads of its own reads one of these before it starts them.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# A thread of torch that is done with its share spins for the others', usually for milliseconds, and holds a core that
# one of them may be waiting for, where other work has the rest: then all are slower than one (`benchmarks/busy.py`). A
# thousand turns are some microseconds.
SHORT_WAITS: Final[Mapping[str, str]] = MappingProxyType({"GOMP_SPINCOUNT": "1000"})


class TrainerProcess:
    """A trainer that is kept alive. `config` is asked at every start, so it may name the round of that moment.

    The consumer of `messages` sends Adopt again after each Ready that is behind: what was sent to a trainer that
    died is lost.
    """

    def __init__(self, arena: Arena, config: Callable[[], Config]) -> None:
        self._arena = arena
        self._config = config
        self._queue: asyncio.Queue[FromTrainer | None] = asyncio.Queue(QUEUE_MESSAGES)
        self._last_words: deque[str] = deque(maxlen=LAST_WORDS_LINES)
        self._life: _Life | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._deaths_in_a_row = 0
        self._stopping = False
        self._failure: MurmurError | None = None
        self.deaths = 0
        self.trouble = "the trainer is starting"  # why there is none at work; empty: there is

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self._life.process.pid if self._life and self._life.process.returncode is None else None

    async def start(self) -> None:
        """Spawn it; returns once it has been given its config. Ready comes through `messages`."""
        self._life = await self._begin()
        self._supervisor = asyncio.create_task(self._supervise(self._life), name="trainer")

    async def messages(self) -> AsyncIterator[FromTrainer]:
        """All that the trainer says, over its restarts. Ends after `stop`; raises MurmurError when it is given up."""
        while (message := await self._queue.get()) is not None:
            yield message
        if self._failure is not None:
            raise self._failure

    async def send(self, message: ToTrainer) -> bool:
        """False when there is no trainer to hear it right now."""
        if self._life is None:
            return False
        try:
            await self._life.channel.send(message)
        except ChannelClosed as closed:
            logger.info("the trainer did not hear %s: %s", message.kind, closed)
            return False
        return True

    async def stop(self, timeout_seconds: float = STOP_SECONDS) -> None:
        """Have it write a last snapshot and end; kill it after `timeout_seconds`. Leaves nothing. May be repeated.

        One that is not at work yet has nothing to write, and may be importing for long on a busy machine: it is killed.
        """
        self._stopping = True
        if self.trouble and self._life is not None:
            self._life.kill()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.send(Stop())
                await self._ended()
        except TimeoutError:
            logger.warning("the trainer did not stop within %.0f s; killing it", timeout_seconds)
        finally:
            await self._end()

    async def _ended(self) -> None:
        # The consumer may be gone: make room, or a trainer full of words never reaches its end.
        while self._supervisor is not None and not self._supervisor.done():
            self._drain()
            await asyncio.wait([self._supervisor], timeout=0.05)

    async def _end(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        if self._life is not None:
            self._life.kill()
            await self._bury(self._life)
        self._drain()
        self._queue.put_nowait(None)

    def _drain(self) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()

    async def _supervise(self, life: "_Life") -> None:
        try:
            while True:
                watching = asyncio.create_task(self._watch(life), name="watchdog of the trainer")
                try:
                    await self._listen(life)
                finally:
                    watching.cancel()
                code = await self._bury(life)
                if self._stopping:
                    break
                self._count_death(_cause(code) if watching.cancelled() else "it no longer moved")
                await asyncio.sleep(self._pause())
                if self._stopping:
                    break
                self._life = life = await self._begin()
        except MurmurError as error:
            self._failure = error
            await self._bury(life)
        except OSError as error:
            self._failure = MurmurError(f"the trainer cannot be started: {error}; free memory or processes")
        await self._queue.put(None)

    async def _listen(self, life: "_Life") -> None:
        """Until it dies; raises the error that it failed with."""
        while True:
            try:
                message = await life.channel.receive()
            except ChannelClosed:
                return
            except MalformedError as error:
                logger.error("the trainer sent something that is no message, killing it: %s", error)
                life.kill()
                return
            if isinstance(message, Failed):
                raise _error_of(message)
            if isinstance(message, Progress | Message):
                self._deaths_in_a_row = 0
            if isinstance(message, Ready):
                self.trouble = ""
            await self._queue.put(message)

    async def _watch(self, life: "_Life") -> None:
        """Kills a trainer that has begun and no longer moves."""
        watchdog: Watchdog | None = None
        while not (watchdog and watchdog.is_stuck):
            await asyncio.sleep(LOOK_SECONDS)
            if self.trouble:
                continue  # it is starting, which takes as long as its data takes
            now, beats = time.monotonic(), self._arena.beats
            watchdog = watchdog or Watchdog(beats, now)
            watchdog.look(beats, now)
        logger.error("the trainer has not moved for %.0f s; killing it", watchdog.silent_seconds)
        life.kill()

    def _count_death(self, cause: str) -> None:
        self.deaths += 1
        self._deaths_in_a_row += 1
        words = self._last_words[-1] if self._last_words else "no last words"
        self.trouble = f"the trainer died ({cause}) and is started again"
        logger.warning("the trainer died (%s), death %d: %s", cause, self.deaths, words)
        if self._deaths_in_a_row >= MAX_DEATHS:
            raise errors.DeviceError(
                f"the trainer died {MAX_DEATHS} times in a row ({cause}), last: {words}; see the lines above, and try "
                "--device cpu or a smaller --memory"
            )

    def _pause(self) -> float:
        return float(min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 4 ** (self._deaths_in_a_row - 1)))

    async def _begin(self) -> "_Life":
        """Where it was to stop meanwhile, nobody could tell it: it has nothing to write yet."""
        life = await self._spawn()
        if self._stopping:
            life.kill()
        return life

    async def _spawn(self) -> "_Life":
        ours, theirs = socket.socketpair()
        try:
            process = await self._execute(theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._last_words.clear()
        hearing = asyncio.create_task(self._hear(process), name="stderr of the trainer")
        life = _Life(process, await DaemonEnd.open(ours), hearing)
        with contextlib.suppress(ChannelClosed):  # dead already: listening will tell
            await life.channel.send(self._config())
        return life

    async def _execute(self, channel_fd: int) -> asyncio.subprocess.Process:
        arena_fd, threads = self._arena.fd, str(self._config().threads)
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "node.trainer"),
            *(str(channel_fd), str(arena_fd), str(os.getpid())),
            pass_fds=(channel_fd, arena_fd),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**SHORT_WAITS, **os.environ, **dict.fromkeys(THREAD_VARIABLES, threads)},
            process_group=0,  # a terminal's Ctrl-C is for the daemon
        )

    async def _hear(self, process: asyncio.subprocess.Process) -> None:
        """Pass the trainer's standard error on to the log, line by line, long lines cut."""
        assert process.stderr is not None
        rest = b""
        while data := await process.stderr.read(LINE_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[:LINE_BYTES]
            for line in lines:
                self._note(line)
        self._note(rest)

    def _note(self, line: bytes) -> None:
        text = line[:LINE_BYTES].decode(errors="replace").strip()
        if text:
            self._last_words.append(text)
            logger.info("trainer: %s", text)

    async def _bury(self, life: "_Life") -> int:
        """Its end of the channel is closed or it is to go: see that nothing of it is left; returns its exit code."""
        await life.channel.close()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                code = await life.process.wait()
        except TimeoutError:
            logger.warning("the trainer closed its channel but lives on; killing it")
            life.kill()
            code = await life.process.wait()
        await life.hearing
        self._life = None
        return code


@dataclass(frozen=True)
class _Life:
    """One run of the process."""

    process: asyncio.subprocess.Process
    channel: DaemonEnd
    hearing: asyncio.Task[None]

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()


def _cause(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _error_of(failed: Failed) -> MurmurError:
    """The error that the trainer raised, by its exit code."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MurmurError)]
    kind = next((kind for kind in kinds if kind.exit_code == failed.exit_code), MurmurError)
    return kind(failed.reason)

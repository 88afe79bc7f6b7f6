"""Supervise the trainer process: spawn it, read its messages, and restart it when it dies or hangs.

A trainer that died resumes from the shared memory after a growing delay. The daemon gives up when the trainer sends
Failed, crashes with the same error MAX_EQUAL_CRASHES times without progress, or dies MAX_CRASHES_IN_A_ROW times without
progress.

A trainer that dies of bytes of another peer says little of this machine. Such deaths count by themselves, up to
MAX_SERVED_CRASHES: the server of the stage turns the peer away before that (`protocol.pipeline.microbatch_table`).

A watchdog kills a trainer that is stuck: a hanging driver raises nothing, and its process goes on running.
"""

import asyncio
import contextlib
import logging
import os
import re
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from node.processes.process import python_environment
from node.trainer.ipc.activation_memory import ActivationMemory
from node.trainer.ipc.channel import (
    ChannelClosed,
    ContributionHeader,
    Crashed,
    DaemonChannel,
    Failed,
    FromTrainer,
    Ready,
    Regrouping,
    Stop,
    ToTrainer,
    TrainerConfig,
    TrainerProgress,
)
from node.trainer.ipc.shared_memory import SharedMemory
from node.trainer.ipc.stage_messages import ComputeStage, StageComputed
from protocol import errors
from protocol.errors import MalformedError, MurmurError

logger = logging.getLogger(__name__)

TRAINER_MODULE = "node.trainer"
MAX_CRASHES_IN_A_ROW = 5
MAX_EQUAL_CRASHES = 2
MAX_SERVED_CRASHES = 20  # in a row, during tasks with bytes of other peers
UNCAUGHT_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception)(:|$)")  # the last line of Python's traceback
MIN_RESTART_DELAY_SECONDS = 0.1
MAX_RESTART_DELAY_SECONDS = 5.0
STOP_SECONDS = 20.0
MAX_QUEUED_MESSAGES = 256
STDERR_TAIL_LINES = 20
MAX_STDERR_LINE_BYTES = 2000
# Libraries with thread pools of their own read one of these when they start them.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# A thread of torch that has finished its part spins while it waits for the others, by default for milliseconds. On a
# busy machine it holds a core that they need, and all threads together are slower than one (`benchmarks/busy.py`). A
# thousand iterations are some microseconds.
SPIN_LIMITS: Final[Mapping[str, str]] = MappingProxyType({"GOMP_SPINCOUNT": "1000"})
WATCHDOG_SECONDS = 5.0  # between two checks
MIN_STUCK_SECONDS = 300.0
STUCK_FACTOR = 20.0  # steps take minutes on some machines


class Watchdog:
    """Detects a stuck trainer process by its heartbeats. All times are seconds of a monotonic clock.

    The trainer records a heartbeat at every iteration of its loop, which is a step or a short wait. It may be silent
    for MIN_STUCK_SECONDS or STUCK_FACTOR times its longest silence, whichever is longer.
    """

    def __init__(self, heartbeat_count: int, now: float) -> None:
        self._heartbeat_count = heartbeat_count
        self._observed_at = now
        self._longest_silence = 0.0
        self.silent_seconds = 0.0

    @property
    def is_stuck(self) -> bool:
        return self.silent_seconds > max(MIN_STUCK_SECONDS, STUCK_FACTOR * self._longest_silence)

    def observe(self, heartbeat_count: int, now: float) -> None:
        # While the daemon is suspended (a closed laptop, a stopped container), so is its trainer, which is not silent.
        elapsed = min(now - self._observed_at, 2 * WATCHDOG_SECONDS)
        self._observed_at = now
        self.silent_seconds += elapsed
        if heartbeat_count != self._heartbeat_count:
            self._longest_silence = max(self._longest_silence, self.silent_seconds)
            self._heartbeat_count = heartbeat_count
            self.silent_seconds = 0.0


@dataclass(frozen=True)
class TrainerRun(ABC):
    """One trainer, from its start to its end: a process that the daemon spawned, or one that a user started."""

    channel: DaemonChannel

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """The id of the process while it runs; `None` for a process of the user."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""

    @abstractmethod
    async def wait(self) -> str:
        """Wait for its end; return how it ended."""


@dataclass(frozen=True)
class SpawnedRun(TrainerRun):
    process: asyncio.subprocess.Process
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


class TrainerProcess:
    """A trainer process that is restarted when it dies. Each start sends `config` with the current `round`.

    The consumer of `messages` sends ApplyAnchor again after each Ready that is behind, because messages to a trainer
    that died are lost.
    """

    def __init__(
        self, shared_memory: SharedMemory, config: TrainerConfig, activations: ActivationMemory | None = None
    ) -> None:
        self._shared_memory = shared_memory
        self._memory_fds = [*shared_memory.fds, *([activations.fd] if activations else [])]
        self._config = config
        self.round = config.round  # a trainer without a snapshot starts from its anchor
        self.settings = config.settings
        self.exact_step = config.exact_step
        self._queue: asyncio.Queue[FromTrainer | None] = asyncio.Queue(MAX_QUEUED_MESSAGES)
        self._stderr_tail: deque[str] = deque(maxlen=STDERR_TAIL_LINES)
        self._run: TrainerRun | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._crashes_in_a_row = self._served_crashes = 0
        self._is_serving = False  # whether it computes a task with bytes of another peer
        self._crash: Crashed | None = None  # the error that this process sent
        self._crash_reasons: list[str] = []  # those of the crashes in a row
        self._regrouping = ""  # why the process ends although nothing failed
        self._stopping = False
        self._failure: MurmurError | None = None
        self.crash_count = self._halvings = 0
        self.not_running_reason = "the trainer is starting"  # empty while it runs
        self.handing_over = asyncio.Lock()  # held while the memory changes hands between the daemon and an own loop

    @property
    def is_absent(self) -> bool:
        """Return whether no trainer runs, and none will before a user starts one."""
        return False

    @property
    def pid(self) -> int | None:
        """Return the id of the running process, if any."""
        return self._run.pid if self._run else None

    async def start(self) -> None:
        """Spawn the trainer and send its config. Ready arrives through `messages`."""
        self._run = await self._start_run()
        self._supervisor = asyncio.create_task(self._supervise(self._run), name="trainer")

    async def messages(self) -> AsyncIterator[FromTrainer]:
        """Yield the trainer's messages, over restarts, until `stop`. Raises MurmurError on giving up."""
        while (message := await self._queue.get()) is not None:
            yield message
        if self._failure is not None:
            raise self._failure

    async def send(self, message: ToTrainer) -> bool:
        """Send a message; return False if no trainer runs now."""
        if self._run is None:
            return False
        if isinstance(message, ComputeStage):
            is_first_pass = message.activation is None and message.gradient is None
            self._is_serving = message.owner != self._config.peer_id or not is_first_pass
        try:
            await self._run.channel.send(message)
        except ChannelClosed as closed:
            logger.info("the trainer did not receive %s: %s", message.kind, closed)
            return False
        return True

    async def stop(self, timeout_seconds: float = STOP_SECONDS) -> None:
        """Let the trainer write a last snapshot and exit; kill it after `timeout_seconds`. May be repeated.

        A trainer that is still starting has nothing to write, and may import for long on a busy machine: it is killed.
        """
        self._stopping = True
        if self.not_running_reason and self._run is not None:
            self._run.kill()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.send(Stop())
                await self._wait_until_exited()
        except TimeoutError:
            logger.warning("the trainer did not stop within %.0f s; killing it", timeout_seconds)
        finally:
            await self._clean_up()

    async def _wait_until_exited(self) -> None:
        # The consumer may be gone: without room in the queue, a trainer with many messages never exits.
        while self._supervisor is not None and not self._supervisor.done():
            self._clear_queue()
            await asyncio.wait([self._supervisor], timeout=0.05)

    async def _clean_up(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        if self._run is not None:
            self._run.kill()
            await self._reap(self._run)
        self._clear_queue()
        self._queue.put_nowait(None)

    def _clear_queue(self) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()

    async def _supervise(self, run: TrainerRun | None) -> None:
        try:
            while True:
                if run is None:
                    self._run = run = await self._start_run()
                watching = asyncio.create_task(self._kill_if_stuck(run), name="watchdog of the trainer")
                try:
                    await self._pump_messages(run)
                finally:
                    watching.cancel()
                end = await self._reap(run)
                run = None
                if self._stopping:
                    break
                self._record_end(end if watching.cancelled() else "it was stuck")
                await asyncio.sleep(self._restart_delay())
                if self._stopping:
                    break
        except MurmurError as error:
            self._failure = error
            if run is not None:
                await self._reap(run)
        except OSError as error:
            self._failure = MurmurError(f"cannot start the trainer: {error}; free memory or end other processes")
        await self._queue.put(None)

    async def _pump_messages(self, run: TrainerRun) -> None:
        """Queue the trainer's messages until it dies. Raises the error of a Failed message."""
        while True:
            try:
                message = await run.channel.receive()
            except ChannelClosed:
                return
            except MalformedError as error:
                logger.error("the trainer sent a malformed message; killing it: %s", error)
                run.kill()
                return
            if isinstance(message, Failed):
                raise errors.error_with_code(message.exit_code, message.reason)
            if isinstance(message, Crashed):
                self._crash = self._crash or message  # of several ranks, the first
                continue
            if isinstance(message, Regrouping):
                self._regrouping = message.reason
                continue
            if isinstance(message, TrainerProgress | ContributionHeader):
                self._crashes_in_a_row = self._served_crashes = 0
                self._crash_reasons.clear()
            if isinstance(message, StageComputed):
                self._is_serving = False
            if isinstance(message, Ready):
                self.not_running_reason = ""
            await self._queue.put(message)

    async def _kill_if_stuck(self, run: TrainerRun) -> None:
        """Kill the trainer if it is ready and then gets stuck."""
        guard: Watchdog | None = None
        while not (guard and guard.is_stuck):
            await asyncio.sleep(WATCHDOG_SECONDS)
            if self.not_running_reason:
                continue  # starting takes as long as loading its data
            now, heartbeat_count = time.monotonic(), self._shared_memory.heartbeat_count
            guard = guard or Watchdog(heartbeat_count, now)
            guard.observe(heartbeat_count, now)
        logger.error("the trainer has been stuck for %.0f s; killing it", guard.silent_seconds)
        run.kill()

    def _record_end(self, cause: str) -> None:
        """Record a crash, unless the trainer ended to start again with other ranks."""
        reason, self._regrouping = self._regrouping, ""
        if not reason:
            self._record_crash(cause)
            return
        self.not_running_reason = f"the trainer starts again: {reason}"
        logger.info("the trainer starts again: %s", reason)

    def _record_crash(self, cause: str) -> None:
        self.crash_count += 1
        was_serving, self._is_serving = self._is_serving, False
        self._served_crashes += was_serving
        self._crashes_in_a_row += not was_serving
        last_line = self._stderr_tail[-1] if self._stderr_tail else "no output"
        crash, self._crash = self._crash or crash_of_stderr(last_line), None
        if crash is not None:
            last_line = crash.reason
            self._halvings += crash.halve
            if not was_serving:
                self._give_up_if_repeated(crash)
        self.not_running_reason = f"the trainer died ({cause}) and is restarting"
        logger.warning("the trainer died (%s), death %d: %s", cause, self.crash_count, last_line)
        if self._crashes_in_a_row >= MAX_CRASHES_IN_A_ROW or self._served_crashes >= MAX_SERVED_CRASHES:
            count = max(self._crashes_in_a_row, self._served_crashes)
            raise errors.DeviceError(
                f"the trainer died {count} times in a row ({cause}), last line: {last_line}; "
                "see the log lines above, and try --device cpu or a smaller --memory"
            )

    def _give_up_if_repeated(self, crash: Crashed) -> None:
        """Raise the error of a trainer that crashes again before it made a step.

        Faults of a device may pass, for example if another program frees its memory.
        """
        self._crash_reasons.append(crash.reason)
        is_of_device = crash.exit_code == errors.DeviceError.exit_code
        if not is_of_device and self._crash_reasons.count(crash.reason) >= MAX_EQUAL_CRASHES:
            text = f"the trainer cannot make a step, it crashes each time: {crash.reason}; report it with your manifest"
            raise errors.error_with_code(crash.exit_code, text)

    def _restart_delay(self) -> float:
        return float(min(MAX_RESTART_DELAY_SECONDS, MIN_RESTART_DELAY_SECONDS * 4 ** (self._deaths_in_a_row - 1)))

    @property
    def _deaths_in_a_row(self) -> int:
        return min(self._crashes_in_a_row + self._served_crashes, MAX_CRASHES_IN_A_ROW)

    async def _start_run(self) -> TrainerRun:
        """Spawn the trainer, and kill it at once if `stop` was called meanwhile: it has nothing to write."""
        run = await self._spawn()
        if self._stopping:
            run.kill()
        return run

    async def _spawn(self) -> TrainerRun:
        ours, theirs = socket.socketpair()
        try:
            process = await self._execute(theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._stderr_tail.clear()
        stderr_task = asyncio.create_task(self._pump_stderr(process), name="stderr of the trainer")
        run = SpawnedRun(await DaemonChannel.open(ours), process, stderr_task)
        with contextlib.suppress(ChannelClosed):  # dead already: `receive` will notice
            await run.channel.send(self._current_config)
        return run

    @property
    def _current_config(self) -> TrainerConfig:
        now = {"round": self.round, "settings": self.settings, "exact_step": self.exact_step}
        now |= {"start": self.crash_count}
        return self._config.model_copy(update=now | {"halvings": self._halvings})

    async def _execute(self, channel_fd: int) -> asyncio.subprocess.Process:
        fds, threads = [channel_fd, *self._memory_fds], str(self._config.options.thread_count)
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", TRAINER_MODULE),
            *map(str, (os.getpid(), *fds)),
            pass_fds=fds,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**SPIN_LIMITS, **python_environment(), **dict.fromkeys(THREAD_VARIABLES, threads)},
            process_group=0,  # a terminal's Ctrl-C must reach the daemon alone
        )

    async def _pump_stderr(self, process: asyncio.subprocess.Process) -> None:
        """Copy the trainer's standard error to the log, line by line; cut long lines."""
        assert process.stderr is not None
        rest = b""
        while data := await process.stderr.read(MAX_STDERR_LINE_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[:MAX_STDERR_LINE_BYTES]
            for line in lines:
                self._log_stderr_line(line)
        self._log_stderr_line(rest)

    def _log_stderr_line(self, line: bytes) -> None:
        text = line[:MAX_STDERR_LINE_BYTES].decode(errors="replace").strip()
        if text:
            self._stderr_tail.append(text)
            logger.info("trainer: %s", text)

    async def _reap(self, run: TrainerRun) -> str:
        """Wait for the trainer to exit, kill it if it does not, and return how it ended."""
        await run.channel.close()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                end = await run.wait()
        except TimeoutError:
            logger.warning("the trainer closed its channel but did not exit; killing it")
            run.kill()
            end = await run.wait()
        self._run = None
        return end


def crash_of_stderr(last_line: str) -> Crashed | None:
    """Return the error with which Python ended a trainer that could not send it, for example while it imported."""
    is_error = UNCAUGHT_ERROR.match(last_line)
    return Crashed(reason=last_line, exit_code=MurmurError.exit_code) if is_error else None

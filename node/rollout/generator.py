"""Supervise the generator process of a rollout peer: start it, send requests, restart it when it dies or hangs.

A message is one line of JSON. The process ends with its daemon, whose death closes its pipe.
"""

import asyncio
import contextlib
import logging
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from node.options import Device
from node.processes.process import python_environment
from protocol.errors import MurmurError
from protocol.fault_words import describe_faults
from protocol.rollout_groups import DrawnAnswer, RolloutGroup

logger = logging.getLogger(__name__)

MODULE = "node.rollout"
MAX_DEATHS_IN_A_ROW = 5
RESTART_SECONDS = 0.5  # after a death, times the deaths in a row
DRAW_SECONDS = 900.0  # for one request; a generator that takes longer hangs
STOP_SECONDS = 20.0
STDERR_BYTES = 4000
MAX_LINE_BYTES = 1 << 26  # of a reply


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GeneratorConfig(_Line):
    """The first line that a generator reads."""

    manifest: str
    base: Path
    maker: str
    device: Device
    threads: int = Field(ge=1)


class DrawRequest(_Line):
    """Draw the groups `serials` with the weights after `round` rounds, which begin the state in the file `state`."""

    round: int
    state: Path
    serials: tuple[int, ...]


class DrawnGroup(_Line):
    """The tokens of each answer with their log probabilities."""

    serial: int
    tokens: tuple[tuple[int, ...], ...]
    log_probabilities: tuple[tuple[float, ...], ...]

    def to_group(self, round_number: int, device: str) -> RolloutGroup:
        answers = zip(self.tokens, self.log_probabilities, strict=True)
        return RolloutGroup(round_number, self.serial, device, tuple(DrawnAnswer(*answer) for answer in answers))


class DrawReply(_Line):
    """The groups, in the order of the request; `lacks_state`: the file was gone before it was read."""

    device: str = ""
    seconds: float = 0.0
    groups: tuple[DrawnGroup, ...] = ()
    lacks_state: bool = False


class GeneratorProcess:
    """The process, started with the first request; `deaths` counts its restarts, `trouble` says why it does not run."""

    def __init__(self, config: GeneratorConfig) -> None:
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
        self._errors: asyncio.Task[bytes] | None = None
        self._deaths_in_a_row = 0
        self.deaths = 0
        self.trouble = ""

    async def draw(self, request: DrawRequest) -> DrawReply:
        """Return the reply, over as many restarts as it takes. Raises MurmurError once it dies again and again."""
        while True:
            try:
                async with asyncio.timeout(DRAW_SECONDS):
                    reply = await self._ask(request)
            except TimeoutError:
                await self._bury(f"it did not answer for {DRAW_SECONDS:g} s")
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                await self._bury(str(error))
            else:
                self._deaths_in_a_row, self.trouble = 0, ""
                return reply

    async def _ask(self, request: DrawRequest) -> DrawReply:
        process = self._process or await self._start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(request.model_dump_json().encode() + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readuntil(b"\n")
        try:
            return DrawReply.model_validate_json(line)
        except ValidationError as error:
            raise ValueError(f"it printed no reply: {describe_faults(error)}") from error

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", MODULE,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES, env=python_environment(), process_group=0,  # of which Ctrl-C reaches none
        )  # fmt: skip
        assert process.stdin is not None and process.stderr is not None
        self._errors = asyncio.create_task(_read_end(process.stderr), name="generator's errors")
        process.stdin.write(self._config.model_dump_json().encode() + b"\n")
        return process

    async def _bury(self, reason: str) -> None:
        """End a process that has failed, and wait before the next one starts. Raises the error of a hopeless one."""
        last = await self._end()
        code = self._process.returncode if self._process is not None else None
        self._process = None
        self.deaths += 1
        self._deaths_in_a_row += 1
        self.trouble = f"the generator died: {last or reason}"
        logger.warning("%s; it is started again", self.trouble)
        is_refusal = bool(last) and code is not None and code > 1  # the exit code of an error of ours
        if self._deaths_in_a_row >= (2 if is_refusal else MAX_DEATHS_IN_A_ROW):
            raise MurmurError(last or f"the generator died {self._deaths_in_a_row} times in a row: {reason}")
        await asyncio.sleep(RESTART_SECONDS * self._deaths_in_a_row)

    async def _end(self) -> str:
        """Kill the process if it runs; returns the last line of its standard error."""
        if self._process is None:
            return ""
        if self._process.returncode is None:
            with contextlib.suppress(TimeoutError):  # it may be about to end by itself, with the reason
                async with asyncio.timeout(1.0):
                    await self._process.wait()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        words = await self._errors if self._errors is not None else b""
        return words.decode(errors="replace").strip().rpartition("\n")[2]

    async def stop(self) -> None:
        """End the process: it ends with its pipe, or is killed."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._errors is not None:
            await self._errors


async def _read_end(stream: asyncio.StreamReader) -> bytes:
    """Read a stream to its end; returns its last bytes."""
    last = b""
    while piece := await stream.read(STDERR_BYTES):
        last = (last + piece)[-STDERR_BYTES:]
    return last

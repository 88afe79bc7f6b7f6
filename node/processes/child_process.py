"""Run one of our modules in a process of its own, with a deadline; the process may give way to all others."""

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from node.processes.process import lower_priority, python_environment

NICENESS = 15
OUT_OF_MEMORY_SCORE = Path("/proc/self/oom_score_adj")


@dataclass(frozen=True)
class ChildResult:
    """The end of a child: its exit code, its standard output, and the last line of its standard error."""

    exit_code: int
    output: bytes
    last_error: str


async def run_module(module: str, arguments: Sequence[str], seconds: float) -> ChildResult:
    """Run `python -m MODULE ARGUMENTS` to its end; the child is killed at the deadline and on cancellation.

    A terminal's Ctrl-C reaches this process alone. Raises TimeoutError, or OSError if the child cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=python_environment(), process_group=0,
    )  # fmt: skip
    try:
        async with asyncio.timeout(seconds):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    assert process.returncode is not None
    last_error = errors.decode(errors="replace").strip().rpartition("\n")[2]
    return ChildResult(process.returncode, output, last_error)


def give_way() -> None:
    """Lower the priority of this process, and let the kernel end it first when memory is short."""
    lower_priority(NICENESS)
    with contextlib.suppress(OSError):
        OUT_OF_MEMORY_SCORE.write_text("1000")

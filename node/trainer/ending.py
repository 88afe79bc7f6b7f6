"""Describe why a trainer's process ends, in one line for the daemon."""

import logging
import traceback
from pathlib import Path

from node.monitoring.logs import sanitize
from node.trainer.devices.device import MicrobatchTooLarge, exit_code_of, is_out_of_memory
from node.trainer.ipc.channel import Crashed, Failed, Regrouping
from protocol.errors import DeviceError, MurmurError

MAX_REASON_CHARACTERS = 300
logger = logging.getLogger(__name__)


class OtherRanksNeeded(Exception):  # noqa: N818
    """The trainer must start again with other ranks; its state is in the shared memory."""


def describe_end(error: Exception, memory: int | None) -> Failed | Crashed | Regrouping:
    """Return the last message of a process that this error ends.

    Args:
        memory: the limit of the process in bytes, if it has one.
    """
    if memory is not None and is_out_of_memory(error):
        error = DeviceError(f"--memory: {memory / 1e6:.0f} MB do not suffice; allow more")
    if isinstance(error, OtherRanksNeeded):
        return Regrouping(reason=sanitize(str(error)))
    if isinstance(error, MurmurError):
        return Failed(reason=sanitize(str(error)), exit_code=error.exit_code)
    frames = traceback.extract_tb(error.__traceback__)
    calls = " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
    logger.info("calls before the crash: %s", calls)
    halve = isinstance(error, MicrobatchTooLarge)
    return Crashed(reason=sanitize(_describe_crash(error)), exit_code=exit_code_of(error), halve=halve)


def _describe_crash(error: Exception) -> str:
    """Describe an error in one line, with the place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else "unknown place"
    text = " ".join(str(error).split())[:MAX_REASON_CHARACTERS]
    return f"{type(error).__name__}: {text} ({place})"

"""Run a command so that every failure of a person or of the environment is one line and an exit code.

A traceback is left for faults of our own. This module imports nothing heavy, because `murmur --help` imports it.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from node.processes.process import INTERRUPTED, discard_output
from protocol.errors import MissingFileError, MurmurError, StorageError

MAX_SHOWN_PATH = 200
BAD_PATH = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EROFS)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PlainGroup(TyperGroup):
    """The group of all commands; it describes a refused value in the words of the manifest's errors."""

    def invoke(self, ctx: Any) -> object:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            faults = getattr(error.__cause__, "errors", None)  # those of pydantic, which typer uses for the types
            if faults is not None:
                from protocol.fault_words import describe_value

                error.message = describe_value(faults(include_url=False)[0])
            raise


def run_guarded(command: Callable[[], object]) -> int:
    """Run a command; returns its exit code."""
    from node.monitoring.logs import sanitize

    try:
        _require_working_directory()
        code = _run_command(command)
        sys.stdout.flush()
        return code
    except MurmurError as error:
        _print_error(sanitize(str(error)))
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone, as in `murmur recipes | head -1`
        discard_output(sys.stdout)
        return 1
    except OSError as error:
        if error.errno in DISK_FULL:
            discard_output(sys.stdout)
            _print_error(f"cannot write {error.filename or 'the output'}: {error.strerror}; free some space")
            return StorageError.exit_code
        if error.errno in BAD_PATH and isinstance(error.filename, str | bytes):
            name = sanitize(os.fsdecode(error.filename)[:MAX_SHOWN_PATH])
            _print_error(f"cannot use {name}: {error.strerror}; name another file or folder")
            return MissingFileError.exit_code
        raise


def _require_working_directory() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise MissingFileError("the working directory no longer exists; change to another one") from error


def _run_command(command: Callable[[], object]) -> int:
    try:
        command()
    except SystemExit as ended:  # typer ends every command with it
        return ended.code if isinstance(ended.code, int) else 1 if ended.code else 0
    return 0


def _print_error(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads standard error any more
        sys.stderr.write(f"murmur: {text}\n")
        sys.stderr.flush()

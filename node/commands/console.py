"""What commands share at the terminal: options, the notice that modules are loaded, failures as one line.

A traceback is left for faults of our own. `murmur --help` imports this module, so heavy ones are imported inside.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from node.processes.process import INTERRUPTED, discard_output, rare_garbage_collection
from protocol.errors import MissingFileError, MurmurError, StorageError

if TYPE_CHECKING:
    import torch

    from node.model.opened_model import OpenedModel

MAX_SEED = 2**63 - 1  # torch takes no larger one
MAX_COUNT = 2**24
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON on standard output")]
InsecureOption = Annotated[bool, typer.Option("--insecure", help="also accept plain http:// over the internet")]
PeerOption = Annotated[
    list[str] | None,
    typer.Option("--peer", metavar="MULTIADDR", help="of a RUN: connect to it first (repeatable)"),
]


def _allow_modules(given: list[str] | None) -> list[str] | None:
    if given:
        from node.own_modules import allow_modules

        allow_modules(given)
    return given


ImportOption = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="FILE.py",
        callback=_allow_modules,
        help="allow a module with parts of a method, a file or an installed one (repeatable)",
    ),
]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="DIR|RUN",
        help="folder of a node or a swarm, a checkpoint, an export; or a RUN of `murmur join`",
    ),
]
MAX_SHOWN_PATH = 200
BAD_PATH = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EROFS)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def names_run(source: str) -> bool:
    """Return whether a user names a run, whose peers have the model, and not a folder."""
    return "://" in source or Path(source).is_file()


@contextmanager
def loading() -> Iterator[None]:
    """Show on a terminal that modules are imported, which may take many seconds on a busy machine."""
    from node.monitoring.status_line import activity

    with activity("loading PyTorch"), rare_garbage_collection():
        yield


@contextmanager
def say_when_interrupted(state: str) -> Iterator[None]:
    """Say after Ctrl-C in which state a command leaves what it worked on."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"murmur: stopped; {state}", err=True)
        raise


def open_model(source: str, peers: Sequence[str], insecure: bool) -> "OpenedModel":
    """Open the model in a folder, or fetch the newest one of a run.

    Args:
        peers: of a run: multiaddresses to connect to first.
        insecure: also accept plain http:// over the internet.

    Raises MurmurError, one line that says what to do.
    """
    from node.model.opened_model import OpenedModel, open_folder  # loads torch

    if not names_run(source):
        return open_folder(Path(source))
    from node.commands.fetch_model import fetch_weights

    trained, _, invitation = fetch_weights(source, peers=peers, insecure=insecure)
    return OpenedModel.of(trained, invitation.base or Path())


def named_device(name: str) -> "torch.device":
    """Return the one device that a person names. Raises UsageError or DeviceError."""
    from node.flags import MachineFlags
    from node.options import TrainerOptions, parse_options
    from node.trainer.devices.device import choose_devices  # loads torch

    return choose_devices(parse_options(TrainerOptions, MachineFlags(device=name)))[0]


GROUPS: Final = (  # of commands, those that a person needs first
    ("First steps", ("up", "init", "join", "host", "status", "doctor")),
    ("Organise a run", ("plan", "steer", "ticket", "runs", "replay")),
    ("The model", ("export", "generate", "chat", "serve", "eval", "tokenize")),
    ("Methods", ("recipes", "sim")),
    ("Your node and your work", ("receipt", "verify", "key", "rollback", "rank")),
)
FIRST_OPTIONS: Final = (  # of up, join and host
    *("peers", "rounds", "folder", "recipe", "http", "dry_run", "public_url", "public", "train", "keep"),
    *("ticket", "device", "name", "allow_data", "help"),
)
MACHINE_OPTIONS: Final = (
    *("threads", "memory", "memory_mode", "disk", "upload", "download", "pause_when_busy"),
    *("devices", "compile", "recompute", "weights", "fp8"),
)


class GroupedCommand(TyperCommand):
    """A command with many options; its help shows those that a person needs first."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[Any]] = {"Options": [], "This machine": [], "More": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and parameter.param_type_name == "option":
                is_first, is_machine = parameter.name in FIRST_OPTIONS, parameter.name in MACHINE_OPTIONS
                groups["Options" if is_first else "This machine" if is_machine else "More"].append(record)
        arguments = [record for each in self.get_params(ctx) if (record := _argument_record(each, ctx)) is not None]
        for title, records in {"Arguments": arguments, **groups}.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _argument_record(parameter: Any, ctx: Any) -> Any:
    return parameter.get_help_record(ctx) if parameter.param_type_name == "argument" else None


class PlainGroup(TyperGroup):
    """The group of all commands; it describes a refused value in the words of the manifest's errors."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        grouped = {name for _, names in GROUPS for name in names}
        others = tuple(name for name in self.commands if name not in grouped)
        for title, names in (*GROUPS, ("More", others)):
            rows = [(name, (self.commands[name].help or "").split("\n\n")[0]) for name in names]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

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

"""Tune this process and the ones that it starts.

This covers garbage collection at start-up and at exit, the limit of open files, thread priorities, and the
environment of a Python child. With the default limit of 1024 descriptors, many viewers of the page would keep the node
from its own files. When the CPU is contended, work that a round waits for comes first, then the trainer, then the rest.
"""

import atexit
import contextlib
import ctypes
import gc
import io
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

RARE_GC_THRESHOLD = 200_000  # new objects between two collections


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Collect garbage rarely while modules are imported, and skip the objects that exist already.

    Imports leave almost no cycles, yet the collector would run about a hundred times, a sixth of a node's start-up. At
    exit it would search all modules of torch again, for more than a second, to free what the system takes back anyway.
    """
    atexit.unregister(gc.freeze)  # once for all calls
    atexit.register(gc.freeze)
    threshold = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(RARE_GC_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()


MAX_FILE_DESCRIPTORS = 65_536  # used if the hard limit is infinite or higher


def raise_fd_limit() -> None:
    """Raise the limit of open files for this process and the processes that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = choose_fd_limit(soft, hard)
    if limit != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def choose_fd_limit(soft: int, hard: int) -> int:
    """Return the new soft limit, never less than the current one."""
    if soft == resource.RLIM_INFINITY:
        return soft
    return max(soft, MAX_FILE_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_FILE_DESCRIPTORS))


PR_SET_NO_NEW_PRIVS = 38


def give_up_privileges() -> None:
    """Let neither this process nor its children gain privileges (setuid programs), and write no core dumps.

    A core dump of a daemon would have its private key. Only Linux has the first; a kernel without it changes nothing.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


# On a CPU, a round's few milliseconds of work would otherwise wait for the many of an inner step, and in the end the
# trainer would wait for the round.
TRAINER_NICENESS = 5
LOW_PRIORITY_NICENESS = 10  # for work that nobody waits for


def lower_priority(niceness: int) -> None:
    """Increase the niceness of this thread and of the threads that it will start.

    Only Linux has a niceness per thread; on other systems this does nothing.
    """
    if sys.platform == "linux":
        os.nice(niceness)


INTERRUPTED = 130  # the exit code after Ctrl-C
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_at_once() -> None:
    """End this process without cleaning up; the trainer and p2pd exit with it."""
    os._exit(INTERRUPTED)


def handle_stop_signals(
    loop: "AbstractEventLoop", on_first: Callable[[], None], on_second: Callable[[], None] = end_at_once
) -> Callable[[], None]:
    """Call `on_first` at the first stop signal and `on_second` at each later one; returns a function that ends this.

    SIGHUP never counts as the second: the kernel and the shell both send it when a terminal closes. A process
    that began with SIGHUP ignored (`nohup`) still ignores it.
    """
    received: list[int] = []

    def receive(number: int) -> None:
        if not received:
            received.append(number)
            on_first()
        elif number != signal.SIGHUP:
            on_second()

    handled = [number for number in STOP_SIGNALS if number != signal.SIGHUP or not is_hangup_ignored()]
    for number in handled:
        loop.add_signal_handler(number, receive, number)

    def stop_handling() -> None:
        for number in handled:
            loop.remove_signal_handler(number)

    return stop_handling


def is_hangup_ignored() -> bool:
    """Return whether this process was started with `nohup`, or detached from its terminal in another way."""
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def python_environment() -> dict[str, str]:
    """Return the environment for a Python process that runs our code, and for those that it starts in turn.

    `python -m` puts the working directory first on the import path, so a file random.py there would run instead of
    Python's. PYTHONSAFEPATH prevents that.
    """
    return {**os.environ, "PYTHONSAFEPATH": "1", **_path_of_checkout(os.environ)}


def _path_of_checkout(environment: Mapping[str, str]) -> dict[str, str]:
    """Return PYTHONPATH for a child, if this process imports the program from a checkout ahead of installed packages.

    The child then imports the same checkout, also after `python -m node.cli` in one that is not installed.
    """
    root, library = str(Path(__file__).parents[2]), os.path.dirname(os.__file__)
    if library not in sys.path or root not in sys.path[: sys.path.index(library)]:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))}


def prepare_standard_streams() -> None:
    """Make standard input, output and error usable, whatever this process was started with.

    A closed stream (`>&-`) becomes the null device: the next file that is opened would otherwise take its number, and
    get the output of libraries. A character that the terminal's encoding lacks is replaced.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def discard_output(stream: TextIO) -> None:
    """Send the rest of a stream to the null device, also what is in its buffer.

    The interpreter writes the buffer when it exits, and prints a traceback if that fails.
    """
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)

"""Network namespaces that are named after the process that owns them, so that none outlives it for long."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

PREFIX = "murmurlab"
FOLDER = Path("/run/netns")
CLONE_NEWNET = 0x40000000
COMMAND_SECONDS = 20.0
TOOLS = ("ip", "tc", "nft", "iptables")
START_TIME_FIELD = 19  # of /proc/PID/stat, counted from behind the name

_libc = ctypes.CDLL(None, use_errno=True)


def run(command: str, words: str = "") -> str:
    """Its output. `words` are its standard input. RuntimeError with what it said when it fails."""
    ended = subprocess.run(
        command.split(), input=words, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"{command}: {ended.stderr.strip()}")
    return ended.stdout


def run_inside(namespace: str, command: str, words: str = "") -> str:
    return run(f"ip netns exec {namespace} {command}", words)


def reason_unavailable() -> str | None:
    """Why this machine lets nobody build networks, if it does not."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not installed: apt-get install iproute2 nftables iptables"
    try:
        remove(create("probe"))
    except RuntimeError as error:
        return f"no right to make a network namespace ({error}); run as root"
    return None


def create(name: str) -> str:
    """The namespace of ours with that name."""
    namespace = f"{PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{name}"
    run(f"ip netns add {namespace}")
    return namespace


def remove(namespace: str) -> None:
    """With every process in it. Another process may remove it at the same time: afterwards it is gone all the same."""
    try:
        for found in run(f"ip netns pids {namespace}").split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(found), signal.SIGKILL)
        run(f"ip netns del {namespace}")
    except RuntimeError:
        if (FOLDER / namespace).exists():
            raise


def remove_orphans() -> None:
    """What killed processes have left, and what a machine that was restarted has left of its mounts."""
    for path in FOLDER.glob(f"{PREFIX}-*-*-*"):
        _, pid, start_time, _ = path.name.split("-", 3)
        if _start_time(int(pid)) != start_time:
            remove(path.name)


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Sockets that this thread makes, and processes that it starts, belong to that namespace."""
    with Path("/proc/thread-self/ns/net").open("rb") as ours, (FOLDER / namespace).open("rb") as theirs:
        _enter(theirs.fileno())
        try:
            yield
        finally:
            _enter(ours.fileno())


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _start_time(pid: int) -> str:
    """In ticks since the machine's start; empty for no process. With the pid it names a process for ever."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return line.rpartition(")")[2].split()[START_TIME_FIELD]

"""What the kernel knows of a peer's processes: who they are, on what they listen, what shared memory they hold."""

import os
import socket
from collections.abc import Iterable

import psutil

MARK = "MURMUR_TEST_MARK"  # in the environment of everything that a test starts
SHARED_MEMORY = "/dev/shm/"


def find_marked(mark: str) -> list[psutil.Process]:
    """All processes that were started, by however many steps, with this mark, but the test itself."""
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and _has_mark(process, mark)]


def process_tree(pid: int) -> list[psutil.Process]:
    """A process and all below it; a daemon, its trainer and its p2pd."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def find_trainer(pid: int) -> psutil.Process | None:
    return _named(pid, "node.trainer")


def find_p2pd(pid: int) -> psutil.Process | None:
    return next(
        (process for process in process_tree(pid) if "".join(_command_line(process)[:1]).endswith("/p2pd")), None
    )


def running_processes(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.is_running() and _state(process) != psutil.STATUS_ZOMBIE]


def open_ports(process: psutil.Process) -> set[tuple[str, str, int]]:
    """What may be reached from outside: (tcp or udp, address, port) of each listening or unconnected socket."""
    found = set()
    for connection in process.net_connections(kind="inet"):
        udp = connection.type == socket.SOCK_DGRAM
        if udp or connection.status == psutil.CONN_LISTEN:
            found.add(("udp" if udp else "tcp", connection.laddr.ip, connection.laddr.port))
    return found


def open_inet_sockets(process: psutil.Process) -> list[object]:
    """Of any kind and state."""
    return list(process.net_connections(kind="inet"))


def open_shared_memory(processes: Iterable[psutil.Process]) -> set[str]:
    """The named shared memory that they have open or mapped; what has no name, or lost it, cannot be left behind."""
    found: set[str] = set()
    for process in processes:
        try:
            maps = {region.path for region in process.memory_maps()}
            files = {file.path for file in process.open_files()}
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        found |= {path for path in maps | files if path.startswith(SHARED_MEMORY) and os.path.exists(path)}
    return found


def taken_ports(ports: Iterable[int]) -> set[int]:
    """Those of the ports on which somebody on this machine listens."""
    wanted = set(ports)
    open_now = [found for found in psutil.net_connections(kind="inet") if found.status == psutil.CONN_LISTEN]
    return wanted & {found.laddr.port for found in open_now if found.laddr}


def _named(pid: int, word: str) -> psutil.Process | None:
    return next((process for process in process_tree(pid) if word in _command_line(process)), None)


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def _state(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
        return False

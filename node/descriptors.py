"""How many files and connections this process may hold: as many as the system lets it, not the usual 1024.

Behind the usual limit a crowd at the page would keep the node from its own files.
"""

import resource

MAX_FILE_DESCRIPTORS = 65_536  # where the system sets no limit


def raise_fd_limit() -> None:
    """Also for the processes that are started from now on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = choose_fd_limit(soft, hard)
    if wanted != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def choose_fd_limit(soft: int, hard: int) -> int:
    """Never less than there is."""
    if soft == resource.RLIM_INFINITY:
        return soft
    return max(soft, MAX_FILE_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_FILE_DESCRIPTORS))

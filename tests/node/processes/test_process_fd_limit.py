import resource

import pytest

from node.processes.process import MAX_FILE_DESCRIPTORS, choose_fd_limit, raise_fd_limit

NONE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "limit"),
    [
        (1024, 4096, 4096),
        (1024, 1 << 20, MAX_FILE_DESCRIPTORS),
        (1024, NONE, MAX_FILE_DESCRIPTORS),
        (4096, 4096, 4096),
        (1 << 20, 1 << 20, 1 << 20),
        (NONE, NONE, NONE),
    ],
)
def test_limit_is_what_the_system_allows(soft: int, hard: int, limit: int) -> None:
    assert choose_fd_limit(soft, hard) == limit


def test_raise_fd_limit_of_this_process() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        raise_fd_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (choose_fd_limit(256, hard), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

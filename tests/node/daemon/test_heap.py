import subprocess
import sys

import pytest

PROBE = """
import ctypes, os, sys, threading
from node.daemon.heap import keep_one_arena
if sys.argv[1] == "one" and not keep_one_arena():
    sys.exit("no arenas")
library, together = ctypes.CDLL(None), threading.Barrier(6)
library.malloc.restype = ctypes.c_void_p
def allocate():
    together.wait()
    held = [library.malloc(5000) for _ in range(2000)]  # ctypes lets go of the interpreter's lock
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
library.fdopen.restype = ctypes.c_void_p
stream = ctypes.c_void_p(library.fdopen(1, b"w"))
library.malloc_info(0, stream)
library.fflush(stream)
"""


def arenas(kept: str) -> int:
    """How many there are after six threads have allocated at the same time."""
    ended = subprocess.run([sys.executable, "-c", PROBE, kept], capture_output=True, text=True, timeout=60)
    if "no arenas" in ended.stderr:
        pytest.skip("this C library knows of no arenas")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.count("<heap nr=")


def test_all_threads_share_one_arena_where_each_would_take_its_own() -> None:
    assert arenas("one") == 1
    assert arenas("each") > 1

"""Unused memory is returned soon; measured in separate processes, with the default as control."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CYCLES = """
import sys
from collections import deque
from node.processes.process_memory import enable_frequent_gc
if sys.argv[1] == "often":
    enable_frequent_gc()
class Ring:
    alive = most = 0
    def __init__(self):
        self.own = self
        Ring.alive += 1
        Ring.most = max(Ring.most, Ring.alive)
    def __del__(self):
        Ring.alive -= 1
held = deque(maxlen=20_000)  # long enough for them to become an old generation
for _ in range(200_000):
    held.append(Ring())
print(Ring.most)
"""

HOLES = """
import sys
import psutil
from node.processes.process_memory import trim
pairs = [(bytes(50_000), bytes(1_000)) for _ in range(2_000)]  # one below the mmap threshold, one small
held = [small for _, small in pairs]
del pairs
if sys.argv[1] == "back":
    trim()
print(psutil.Process().memory_info().rss)
"""

FAILURES = """
import sys
import psutil
from node.processes.process_memory import enable_frequent_gc, trim
enable_frequent_gc()
def fail():
    payload = bytearray(b"x") * 1_000_000
    try:
        raise ValueError
    except ValueError as error:
        kept = error  # whose traceback holds this frame
for _ in range(100):
    fail()
if sys.argv[1] == "back":
    trim()
print(psutil.Process().memory_info().rss)
"""

ARENAS = """
import ctypes, sys, threading
from pathlib import Path
import node.daemon.lifecycle  # starts some threads
from node.processes.process_memory import use_one_malloc_arena
if sys.argv[1] == "one":
    use_one_malloc_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
met = threading.Barrier(8)
def work():
    libc.malloc(100_000)
    met.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
print(Path(sys.argv[2]).read_text().count("<heap "))
"""

of_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")


def run_program(program: str, *arguments: str) -> str:
    ended = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def max_alive(often: str) -> int:
    """Return the most cycles alive at once, of 200,000 with 20,000 referenced at any time."""
    return int(run_program(CYCLES, often))


def test_cycles_are_freed_soon() -> None:
    often, by_default = max_alive("often"), max_alive("default")
    print(f"at most {often}, default {by_default}")
    assert often < 50_000 < by_default


@of_glibc
def test_free_blocks_between_used_ones_are_returned() -> None:
    back, default = (int(run_program(HOLES, mode)) for mode in ("back", "default"))
    print(f"{back / 1e6:.0f} MB, default {default / 1e6:.0f}")
    assert default - back > 60e6, "of 100 MB freed; pages with used blocks stay"


def test_memory_held_by_failed_frames_is_returned() -> None:
    back, default = (int(run_program(FAILURES, mode)) for mode in ("back", "default"))
    print(f"{back / 1e6:.0f} MB, default {default / 1e6:.0f}")
    assert default - back > 60e6, "of 100 MB in few cycles"


@of_glibc
def test_threads_share_one_malloc_arena(tmp_path: Path) -> None:
    one, default = (int(run_program(ARENAS, mode, str(tmp_path / "arenas"))) for mode in ("one", "default"))
    print(f"{one} arenas, default {default}")
    assert one < default - 4

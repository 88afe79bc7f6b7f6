"""What is not needed any more is soon given back; in processes of their own, with the usual way as control."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

CYCLES = """
import sys
from collections import deque
from node.process_memory import enable_frequent_gc
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
held = deque(maxlen=20_000)  # long enough to be taken for what stays
for _ in range(200_000):
    held.append(Ring())
print(Ring.most)
"""

HOLES = """
import sys
import psutil
from node.process_memory import trim
pairs = [(bytes(50_000), bytes(1_000)) for _ in range(2_000)]  # below what malloc gets apart, and just after it
held = [small for _, small in pairs]
del pairs
if sys.argv[1] == "back":
    trim()
print(psutil.Process().memory_info().rss)
"""

FAILURES = """
import sys
import psutil
from node.process_memory import enable_frequent_gc, trim
enable_frequent_gc()
def fail():
    on_the_way = bytearray(b"x") * 1_000_000
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
import node.daemon.lifecycle  # some threads are there
from node.process_memory import use_one_malloc_arena
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


def told_by(program: str, *words: str) -> str:
    ended = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def most_at_once(often: str) -> int:
    """Of 200,000 cycles, 20,000 of which are held at any time."""
    return int(told_by(CYCLES, often))


def test_what_cycles_hold_is_freed_soon() -> None:
    often, usually = most_at_once("often"), most_at_once("as usual")
    print(f"at most {often}, as usual {usually}")
    assert often < 50_000 < usually


@of_glibc
def test_what_lies_between_others_in_use_is_given_back() -> None:
    back, usual = (int(told_by(HOLES, word)) for word in ("back", "as usual"))
    print(f"{back / 1e6:.0f} MB, as usual {usual / 1e6:.0f}")
    assert usual - back > 60e6, "of 100 MB that were freed, in pages, as what is in use shares some"


def test_what_failures_left_in_cycles_is_given_back() -> None:
    back, usual = (int(told_by(FAILURES, word)) for word in ("back", "as usual"))
    print(f"{back / 1e6:.0f} MB, as usual {usual / 1e6:.0f}")
    assert usual - back > 60e6, "of 100 MB in few cycles"


@of_glibc
def test_threads_share_one_arena(tmp_path: Path) -> None:
    one, usual = (int(told_by(ARENAS, word, str(tmp_path / "arenas"))) for word in ("one", "as usual"))
    print(f"{one} arenas, as usual {usual}")
    assert one < usual - 4

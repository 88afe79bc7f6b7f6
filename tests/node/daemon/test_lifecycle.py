import subprocess
import sys

PROBE = """
import sys
from collections import deque
from node.daemon.lifecycle import collect_often
if sys.argv[1] == "often":
    collect_often()
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


def most_at_once(often: str) -> int:
    """Of 200,000 cycles, 20,000 of which are held at any time."""
    ended = subprocess.run([sys.executable, "-c", PROBE, often], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout)


def test_what_cycles_hold_is_freed_soon() -> None:
    often, usually = most_at_once("often"), most_at_once("as usual")
    print(f"at most {often}, as usual {usually}")
    assert often < 50_000 < usually

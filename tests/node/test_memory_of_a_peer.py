"""A peer holds few bytes a parameter through a step, a round, a checkpoint and the start from it.

The recipe is `diloco`, whose outer optimizer has a vector of its own: what holds for it holds for `frugal`.
"""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

BOUND, SMALL_BOUND = 40, 20  # bytes a parameter, on a CPU
SCRIPT = "tests.node.peer_in_one_process"


def measure(*arguments: str) -> float:
    """Return the most bytes a parameter of a peer whose daemon and trainer are one process."""
    command = [sys.executable, "-m", SCRIPT, "--recipe", "diloco", *arguments]
    return float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)


def test_peer_stays_below_its_bound() -> None:
    """The control copies the trainer's vectors before it writes them, as checkpoints did once."""
    assert measure() <= BOUND
    assert measure("--copy") > BOUND + 10


def test_peer_with_little_memory_stays_below_its_bound() -> None:
    """The control copies the vectors in the same way."""
    assert measure("--small") <= SMALL_BOUND
    assert measure("--small", "--copy") > SMALL_BOUND + 5

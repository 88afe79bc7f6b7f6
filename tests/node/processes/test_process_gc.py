"""Garbage collection is rare during imports, normal afterwards, and absent at exit."""

import gc
import subprocess
import sys

import pytest

from node.processes.process import RARE_GC_THRESHOLD, rare_garbage_collection

pytestmark = pytest.mark.slow

# Prints the number of count_collections during the import of a daemon's modules.
IMPORTS = """
import gc, sys
from contextlib import nullcontext
from node.processes.process import rare_garbage_collection
with rare_garbage_collection() if sys.argv[1] == "rarely" else nullcontext():
    before = sum(generation["collections"] for generation in gc.get_stats())
    import node.daemon.lifecycle
    print(sum(generation["collections"] for generation in gc.get_stats()) - before)
"""

# Says at exit whether the collector found a cycle.
EXIT = """
import gc, os, sys
from contextlib import nullcontext
from node.processes.process import rare_garbage_collection
with rare_garbage_collection() if sys.argv[1] == "rarely" else nullcontext():
    pass
class Cycle:
    def __init__(self, write=os.write):
        self.itself, self.write = self, write
    def __del__(self):
        self.write(1, b"found")
gc.disable()
Cycle()
"""


def count_collections(mode: str) -> int:
    command = [sys.executable, "-c", IMPORTS, mode]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)


def test_few_collections_during_the_imports_of_a_daemon() -> None:
    assert count_collections("rarely") <= 10
    assert count_collections("default") > 300, "control"


@pytest.mark.parametrize(("mode", "output"), [("rarely", ""), ("default", "found")])
def test_no_search_for_garbage_at_exit(mode: str, output: str) -> None:
    command = [sys.executable, "-c", EXIT, mode]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout == output


def test_threshold_is_restored_after_an_error() -> None:
    threshold = gc.get_threshold()
    with pytest.raises(ValueError, match="whatever"), rare_garbage_collection():
        assert gc.get_threshold()[0] == RARE_GC_THRESHOLD
        assert gc.get_freeze_count() > 0
        raise ValueError("whatever")
    assert gc.get_threshold() == threshold
    assert gc.get_freeze_count() == 0

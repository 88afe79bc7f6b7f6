"""When the collector of cycles rests, and that it comes back."""

import gc
import subprocess
import sys

import pytest

from node.process import RARE_GC_THRESHOLD, rare_garbage_collection

# Prints how often the collector came while a daemon's modules were imported.
IMPORTS = """
import gc, sys
from contextlib import nullcontext
from node.process import rare_garbage_collection
with rare_garbage_collection() if sys.argv[1] == "rarely" else nullcontext():
    before = sum(generation["collections"] for generation in gc.get_stats())
    import node.daemon.lifecycle
    print(sum(generation["collections"] for generation in gc.get_stats()) - before)
"""


def collections(way: str) -> int:
    command = [sys.executable, "-c", IMPORTS, way]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)


def test_a_start_is_not_held_up_by_looking_for_cycles() -> None:
    assert collections("rarely") <= 10
    assert collections("as usual") > 300, "the control"


def test_it_comes_as_before_behind_an_error_too() -> None:
    usual = gc.get_threshold()
    with pytest.raises(ValueError, match="whatever"), rare_garbage_collection():
        assert gc.get_threshold()[0] == RARE_GC_THRESHOLD
        assert gc.get_freeze_count() > 0
        raise ValueError("whatever")
    assert gc.get_threshold() == usual
    assert gc.get_freeze_count() == 0

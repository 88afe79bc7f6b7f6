"""Two peers that call each other at the same moment, on a long line: their calls cross."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.netlab.lab import dialing_peer
from tests.netlab.lab.laboratory import Laboratory, Link, read_line
from tests.swarm.process_swarm import isolated_processes

pytestmark = [pytest.mark.netlab, pytest.mark.timeout(120)]

LONG = Link(up=20, down=20, delay=0.04)
NOTICE = 0.5  # seconds
ATTEMPTS = 4
SOON = 3.0  # seconds; a call that failed is not tried again for longer


def meet(laboratory: Laboratory, folder: Path, way: str) -> list[dict[str, Any]]:
    """What became of both calls."""
    folder.mkdir()
    peers = []
    for name in "ab":
        node = laboratory.ordinary_node(LONG)
        words = [str(folder / f"{way}-{name}"), node.address, way]
        peers.append(laboratory.start(node, [sys.executable, dialing_peer.__file__, *words]))
    addresses = [read_line(peer) for peer in peers]
    moment = time.monotonic() + NOTICE
    for peer, other in zip(peers, reversed(addresses), strict=True):
        assert peer.stdin
        peer.stdin.write(f"{other} {moment}\n")
        peer.stdin.flush()
    outcomes = [json.loads(read_line(peer)) for peer in peers]
    print(way, outcomes)
    return outcomes


def is_hindered(call: dict[str, Any]) -> bool:
    return bool(call["trouble"]) or call["seconds"] > SOON


def test_calls_that_cross_both_arrive(laboratory: Laboratory, tmp_path: Path) -> None:
    """The control tries several times: on a busy machine one call may begin so late that they do not cross."""
    with isolated_processes():
        assert not any(map(is_hindered, meet(laboratory, tmp_path / "ours", "ours")))
        naive = (meet(laboratory, tmp_path / str(attempt), "reuse") for attempt in range(ATTEMPTS))
        assert any(any(map(is_hindered, calls)) for calls in naive), "the control"

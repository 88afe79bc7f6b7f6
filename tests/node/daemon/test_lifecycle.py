import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.daemon.lifecycle import Daemon
from node.daemon.metrics import Metrics
from node.daemon.standing import Standing
from node.folder import RunFolder
from node.status import NodeStatus
from protocol.errors import DeviceError

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


async def for_ever() -> None:
    await asyncio.Event().wait()


async def at_once() -> None:
    pass


async def broken() -> None:
    raise DeviceError("the trainer does not start; see its log")


class Node:
    """What a daemon takes apart again, with a trainer that ends as told."""

    def __init__(self, trainer: Any) -> None:
        self.directory = SimpleNamespace(run=for_ever, leave=at_once)
        self.rendezvous = SimpleNamespace(run=for_ever)
        self.participant = SimpleNamespace(run=for_ever)
        self.trainer_failure, self.finish = trainer, at_once
        self.standing = Standing(NodeStatus(peer_id="p", run="demo", run_id="0", step=300), Metrics(), dict)

    def publish_progress(self) -> None:
        pass


async def test_why_a_node_ended_is_its_last_word(tmp_path: Path) -> None:
    daemon = Daemon(cast(Any, None), RunFolder(tmp_path), cast(Any, None))
    with pytest.raises(DeviceError):
        await daemon._take_part(cast(Any, Node(broken)))
    said = json.loads((tmp_path / "status.json").read_bytes())
    assert (said["phase"], said["step"], said["reason"]) == ("leaving", 300, "the trainer does not start; see its log")


async def stray() -> None:
    raise asyncio.CancelledError


async def test_a_cancel_out_of_nowhere_does_not_end_it_without_a_word(tmp_path: Path) -> None:
    daemon = Daemon(cast(Any, None), RunFolder(tmp_path), cast(Any, None))
    with pytest.raises(asyncio.CancelledError):
        await daemon._take_part(cast(Any, Node(stray)))
    assert json.loads((tmp_path / "status.json").read_bytes())["reason"] == "CancelledError"


async def test_a_node_that_is_told_to_end_has_no_reason(tmp_path: Path) -> None:
    daemon = Daemon(cast(Any, None), RunFolder(tmp_path), cast(Any, None))
    daemon._signalled()
    await daemon._take_part(cast(Any, Node(for_ever)))
    said = json.loads((tmp_path / "status.json").read_bytes())
    assert (said["phase"], said["reason"]) == ("leaving", "")

import asyncio
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.daemon.lifecycle import Daemon
from node.monitoring.display import Display
from node.monitoring.metrics import Metrics
from node.monitoring.status import NodeStatus
from node.monitoring.status_reporter import StatusReporter
from node.run_dir import RunDir
from protocol.errors import DeviceError


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
        self.stage_chains = None
        self.run_replicas = trainer
        self.finish = self.drain = at_once
        self.reporter = StatusReporter(NodeStatus(peer_id="p", run="demo", run_id="0", step=300), Metrics())
        self.status = self.reporter.status

    def set_leaving(self, reason: str) -> None:
        self.reporter.set_phase("leaving", reason)

    def publish_progress(self) -> None:
        pass


def daemon_in(folder: Path) -> Daemon:
    options = SimpleNamespace(disk=None)  # the budget follows from the free space
    return Daemon(cast(Any, options), RunDir(folder), Display(io.StringIO()), cast(Any, None))


async def test_why_a_node_ended_is_its_last_word(tmp_path: Path) -> None:
    daemon = daemon_in(tmp_path)
    with pytest.raises(DeviceError):
        await daemon._take_part(cast(Any, Node(broken)))
    said = json.loads((tmp_path / "status.json").read_bytes())
    assert (said["phase"], said["step"], said["reason"]) == ("leaving", 300, "the trainer does not start; see its log")


async def stray() -> None:
    raise asyncio.CancelledError


async def test_a_cancel_out_of_nowhere_does_not_end_it_without_a_word(tmp_path: Path) -> None:
    daemon = daemon_in(tmp_path)
    with pytest.raises(asyncio.CancelledError):
        await daemon._take_part(cast(Any, Node(stray)))
    assert json.loads((tmp_path / "status.json").read_bytes())["reason"] == "CancelledError"


async def test_a_node_that_is_told_to_end_has_no_reason(tmp_path: Path) -> None:
    daemon = daemon_in(tmp_path)
    daemon._on_signal()
    await daemon._take_part(cast(Any, Node(for_ever)))
    said = json.loads((tmp_path / "status.json").read_bytes())
    assert (said["phase"], said["reason"]) == ("leaving", "")

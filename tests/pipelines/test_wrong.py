"""Tasks and results of a wrong size, stage or value are refused, counted by peer, and given up after three peers."""

from pathlib import Path

import pytest

from tests.pipelines.swarm import Setting, Start, running

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]
MICROBATCHES, WRONG = 6, 3
FAULTS = ("task size", "task input", "task stage", "result size", "result stage", "nan")


def test_wrong_activations_are_refused_and_their_makers_named(zygote: str, tmp_path: Path) -> None:
    """The seeds of `tests/protocol/pipeline` find the control, an owner that never gives up."""
    starts = [Start(number % 2, f"wrong={fault}:{WRONG}") for number, fault in enumerate(FAULTS)]
    with running(zygote, tmp_path, Setting(), *starts) as swarm:
        swarm.begin(MICROBATCHES)
        ended = swarm.wait_until_ended(len(FAULTS) * MICROBATCHES)
        by_fault = dict(zip(FAULTS, swarm.peers, strict=True))
        dropped = [name for name, how in ended.items() if how != "done"]
        assert {ended[name] for name in dropped} <= {"refused"} and len(dropped) <= 1, swarm.describe()
        for fault in ("task size", "task input", "result size", "nan"):
            assert any(f"refusing a call of {by_fault[fault].name}" in peer.full_log() for peer in swarm.peers), fault
        assert all(swarm.audit(peer).doubled == 0 for peer in swarm.peers)
        assert sum(peer.counts()["refusals"].get("malformed", 0) for peer in swarm.peers) >= WRONG

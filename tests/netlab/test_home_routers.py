"""Two peers at home, each behind a router that lets nobody in, and one that everybody can call."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from node.from_manifest import build_program
from node.monitoring.status import NodeStatus
from protocol.transport.nat import CIRCUIT_MARKER
from tests.netlab.lab.lab_swarm import LISTEN, LabPeer, LabSwarm, running_lab_swarm
from tests.netlab.lab.laboratory import Laboratory, Link, Node
from tests.swarm.process_swarm import ENDLESS, manifest_with

pytestmark = [pytest.mark.netlab, pytest.mark.timeout(180)]

ROUNDS = 4
LINK = Link(up=20, down=50, delay=0.01)
CIRCUIT_BYTES = 128 * 1024  # that a relay passes on
DENSE: Mapping[str, Mapping[str, Any]] = {
    "model": {"width": 64, "layers": 2, "hidden": 256},
    "method": {"codec": {"kind": "none"}, "schedule": {"inner_steps": 10}},
    "round": {"parts": 3, "exchange_timeout": 4.0},
    "target": {"rounds": ENDLESS},
}
LONELY = 16.0  # seconds
NOT_CARRIED = "tests.netlab.lab.lonely_peer"


def hidden(status: NodeStatus) -> bool:
    return any(CIRCUIT_MARKER in address for address in status.addresses)


def homes(laboratory: Laboratory) -> list[Node]:
    """One that everybody can call, and two at home."""
    return [laboratory.node(LINK), *(laboratory.node(behind=laboratory.router(LINK)) for _ in range(2))]


def wait_until_taken(swarm: LabSwarm, rounds: int) -> float:
    """Until so many rounds more have taken the work of each."""
    told = {status.peer_id: status.contributions_included for status in swarm.poll()}

    def taken() -> bool:
        return all(now.contributions_included >= told[now.peer_id] + rounds for now in swarm.poll())

    return swarm.wait_until(taken, f"the work of all is taken {rounds} times")


@pytest.mark.timeout(300)
def test_hidden_peers_train_together_through_one_that_carries_their_blobs(
    laboratory: Laboratory, tmp_path: Path
) -> None:
    manifest, nodes = manifest_with(**DENSE), homes(laboratory)
    assert build_program(manifest).max_part_bytes > 1.5 * CIRCUIT_BYTES
    with running_lab_swarm(tmp_path / "carried", manifest, laboratory, nodes) as swarm:
        swarm.start()
        swarm.wait_for_round(1)
        seconds = wait_until_taken(swarm, ROUNDS)
        swarm.wait_for_agreement(after=max(status.round for status in swarm.poll()))
        carried = [status.bytes_carried for status in swarm.poll()]
        print(f"the work of all was taken {ROUNDS} times in {seconds:.1f} s; carried: {carried}")
        assert carried[0] > ROUNDS * CIRCUIT_BYTES and carried[1:] == [0, 0]
        at_home = swarm.peers[1:]
        assert all(map(hidden, swarm.poll(*at_home))), "they say how they are reached"
        laboratory.cut(nodes[0])
        swarm.wait_until(
            lambda: all(status.peers == 1 for status in swarm.poll(*at_home)),
            "the control: without the third they lose each other, too",
        )
    laboratory.heal()
    with running_lab_swarm(tmp_path / "control", manifest, laboratory, nodes) as swarm:
        for peer in swarm.lab_peers:
            peer.replace_module(NOT_CARRIED)
        swarm.start()
        swarm.wait_for_round(1)
        end = time.monotonic() + LONELY
        swarm.wait_until(lambda: time.monotonic() >= end, "rounds of which each takes the work of some")
        told = swarm.poll()
        taken, rounds = [status.contributions_included for status in told], max(status.round for status in told)
        print(f"the control: nobody carries, and of {rounds} rounds so many took the work of each: {taken}")
        assert sum(taken[1:]) <= rounds, "never both: at most one had a round with the third for itself"


def test_a_host_at_home_is_found_through_its_introducer(laboratory: Laboratory, tmp_path: Path) -> None:
    nodes = [laboratory.node(LINK), laboratory.node(behind=laboratory.router(LINK))]
    with running_lab_swarm(tmp_path, manifest_with(target={"rounds": ENDLESS}), laboratory, nodes[:1]) as swarm:
        swarm.start()
        home = tmp_path / "host"
        words = [sys.executable, "-m", "node.cli", "host", str(swarm.run), "--dir", str(home), "--listen", LISTEN]
        swarm.peers.append(LabPeer("host", home, [*words, "--http", "127.0.0.1:0"], laboratory, nodes[1]))
        swarm.peers[1].start(swarm.lab_peers[0].public_addresses())
        host = swarm.peers[1]
        swarm.wait_until(
            lambda: any(hidden(told) and told.peers == 1 for told in swarm.poll(host)), "it sees the other"
        )

"""Two peers at home, each behind a router that lets nobody in, and one that everybody can call."""

import sys
from pathlib import Path

import pytest

from node.status import NodeStatus
from protocol.network.reach import RELAYED
from tests.netlab.laboratory import Laboratory, Link
from tests.netlab.scattered import LISTEN, ScatteredPeer, scattered
from tests.swarm.flock import ENDLESS, manifest_with

pytestmark = [pytest.mark.netlab, pytest.mark.timeout(90)]

ROUNDS = 8
LINK = Link(up=20, down=50, delay=0.01)


def hidden(status: NodeStatus) -> bool:
    return any(RELAYED in address for address in status.addresses)


def test_hidden_peers_train_together_through_one_that_is_not(laboratory: Laboratory, tmp_path: Path) -> None:
    nodes = [laboratory.node(LINK), *(laboratory.node(behind=laboratory.router(LINK)) for _ in range(2))]
    manifest = manifest_with(target={"rounds": ENDLESS}, method={"schedule": {"inner_steps": 20}})
    with scattered(tmp_path, manifest, laboratory, nodes) as flock:
        flock.start()
        flock.wait_for_round(1)
        told = {status.peer_id: status.contributions_included for status in flock.look()}

        def taken() -> bool:
            return all(now.contributions_included >= told[now.peer_id] + ROUNDS for now in flock.look())

        seconds = flock.wait(taken, f"the work of all is taken {ROUNDS} times", 40)
        flock.wait_for_agreement(after=max(status.round for status in flock.look()))
        print(f"the work of all was taken {ROUNDS} times in {seconds:.1f} s")
        at_home = flock.peers[1:]
        assert all(map(hidden, flock.look(*at_home))), "they say how they are reached"
        laboratory.cut(nodes[0])
        flock.wait(
            lambda: all(status.peers == 1 for status in flock.look(*at_home)),
            "the control: without the third they lose each other, too",
        )


def test_a_host_at_home_is_found_through_its_introducer(laboratory: Laboratory, tmp_path: Path) -> None:
    nodes = [laboratory.node(LINK), laboratory.node(behind=laboratory.router(LINK))]
    with scattered(tmp_path, manifest_with(target={"rounds": ENDLESS}), laboratory, nodes[:1]) as flock:
        flock.start()
        home = tmp_path / "host"
        words = [sys.executable, "-m", "node.cli", "host", str(flock.run), "--dir", str(home), "--listen", LISTEN]
        flock.peers.append(ScatteredPeer("host", home, [*words, "--http", "127.0.0.1:0"], laboratory, nodes[1]))
        flock.peers[1].start(flock.scattered[0].public())
        host = flock.peers[1]
        flock.wait(lambda: any(hidden(told) and told.peers == 1 for told in flock.look(host)), "it sees the other")

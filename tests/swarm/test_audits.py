"""Audits among real peers: one of them makes half of its steps, and the others find out."""

import sys
from pathlib import Path

import pytest

from node.commands.up.peer_process import PeerProcess
from tests.swarm.process_swarm import ProcessSwarm, join_command, manifest_with, running_swarm

# A conviction takes the repetitions of all honest voters, at a low priority: on two cores some six minutes.
pytestmark = [pytest.mark.swarm, pytest.mark.nightly, pytest.mark.timeout(900)]

PEERS = 4
LIED = "audit: lied"


def audited_run() -> dict[str, dict[str, object]]:
    """Return changes of a run on a mixture, whose weights are others from its first round on."""
    sources = [{"name": name, "source": "text", "path": "corpus.txt", "weight": 1.0} for name in ("few", "many")]
    phases = [{"tokens": 1, "weights": {"few": 1.0, "many": 9.0}}]
    return {
        "data": {"source": None, "path": "", "sources": sources, "phases": phases},
        "run": {"min_peers": PEERS},
        "round": {"grace": 5.0, "leader_timeout": 5.0},
        "method": {"recipe": "diloco", "schedule": {"inner_steps": 30}},
        "audits": {"share": 0.2},
        "target": {"rounds": 1_000_000},
    }


def make_lazy(swarm: ProcessSwarm, index: int) -> None:
    name = f"peer-{index}"
    home = swarm.run.parent / name
    command = join_command(swarm.run, home, "--name", name)
    command[command.index("node.cli")] = "tests.swarm.peers.lazy_peer"
    assert command[0] == sys.executable
    swarm.peers[index] = PeerProcess(name, home, command)


def test_peers_find_the_one_that_makes_half_of_its_steps(tmp_path: Path) -> None:
    with running_swarm(tmp_path, manifest_with(**audited_run()), PEERS) as swarm:
        make_lazy(swarm, PEERS - 1)
        swarm.start()
        honest = swarm.peers[:-1]
        swarm.wait_until(lambda: any(status.refusals.get(LIED) for status in swarm.poll(*honest)), "it is found", 700)
        statuses = swarm.poll(*honest)
        liar = swarm.poll(swarm.peers[-1])[0].peer_id
        lines = [line for peer in honest for line in swarm.log(peer).splitlines() if "lied about its work" in line]
        assert lines and all("peer-3" in line or liar in line for line in lines)
        # The control: honest contributions were repeated too, and nobody found a difference in them.
        swarm.wait_until(
            lambda: sum(status.audits.get("equal", 0) for status in swarm.poll(*honest)) >= 1, "honest work agrees", 120
        )
        assert not any(status.refusals.get("audit: false finding") for status in statuses)

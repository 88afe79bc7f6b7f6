"""Two machines in two networks train as one peer through tunnels, and nothing but the site's port is reachable."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from node.trainer.ipc.channel import ApplyAnchor, ContributionHeader
from node.trainer.site.token import SiteToken, load_site_key
from tests.netlab.lab import namespaces
from tests.node.trainer.ranks.test_two_processes import OneRank
from tests.node.trainer.site.test_site import free_port, machine, ready_with, site_harness
from tests.node.trainer.state_harness import copy_arena
from tests.swarm.processes import open_ports, process_tree

pytestmark = [pytest.mark.netlab, pytest.mark.timeout(240)]

HEAD, OTHER = f"10.{os.getpid() % 200 + 20}.7.1", f"10.{os.getpid() % 200 + 20}.7.2"


@pytest.fixture
def other_network(permitted: None) -> Iterator[str]:
    """Yield a namespace that a link joins with this one."""
    namespace, ours = namespaces.create("site"), f"site{os.getpid() % 100000}"
    try:
        namespaces.run(f"ip link add {ours} type veth peer name far netns {namespace}")
        namespaces.run(f"ip addr add {HEAD}/24 dev {ours}")
        namespaces.run(f"ip link set {ours} up")
        for command in ("link set lo up", f"addr add {OTHER}/24 dev far", "link set far up"):
            namespaces.run_inside(namespace, f"ip {command}")
        yield namespace
    finally:
        namespaces.remove(namespace)


async def test_machines_in_two_networks_send_what_one_would(other_network: str, tmp_path: Path) -> None:
    """Control: on this network, the rendezvous and the ranks listen at loopback addresses alone."""
    port = free_port()
    two = site_harness(tmp_path, port, host=HEAD)
    alone = OneRank(two, copy_arena(two.arena))
    token = str(SiteToken.of(load_site_key(tmp_path / "site-key")))
    python = f"{sys.executable}"
    try:
        async with machine(port, token, host=HEAD, python=("ip", "netns", "exec", other_network, python)) as other:
            await two.trainer.start()
            ready = await ready_with(two, 2)
            assert ready.step == 0
            pid = two.trainer.pid
            assert pid is not None
            listening = open_ports(psutil.Process(pid))
            assert {found for found in listening if not found[1].startswith("127.")} == {("tcp", HEAD, port)}
            assert len([found for found in listening if found[1].startswith("127.")]) >= 3, "store, gloo and tunnel"
            for process in process_tree(other.pid):
                assert all(found[1].startswith("127.") for found in open_ports(process)), "it listens to nobody"
            theirs, ours = await two.until(ContributionHeader), alone.contribute()
            assert (theirs.steps, theirs.tokens) == (ours.steps, ours.tokens)
            assert theirs.loss == pytest.approx(ours.loss, abs=1e-6)
            for name, vector in alone.memory.vectors.items():
                assert (two.arena.vectors[name] - vector).abs().max() < 1e-6, name
            await two.trainer.send(ApplyAnchor(round=1, outcome="included"))
    finally:
        await two.close()
        alone.memory.close()

"""What a running node lets in: p2pd's port, that for direct connections, and on loopback its numbers; nothing else."""

import stat
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.paths import read_metrics_port
from tests.swarm.process_swarm import ENDLESS, ProcessSwarm, daemon_pid, manifest_with, running_swarm
from tests.swarm.processes import find_p2pd, find_trainer, open_inet_sockets, open_ports, process_tree

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

METRICS = ("tokens", "loss", "rounds", "bytes", "seconds", "peers_known", "blobs", "refusals", "round", "node_info")


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessSwarm]:
    manifest = manifest_with(target={"rounds": ENDLESS}, run={"min_peers": 2})
    with running_swarm(tmp_path_factory.mktemp("doors"), manifest, peers=2) as made:
        made.start()
        made.wait_for_round(3)
        yield made


def page(swarm: ProcessSwarm, path: str, host: str = "127.0.0.1") -> str:
    port = read_metrics_port(swarm.peers[0].folder)
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Host": f"{host}:{port}"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return str(answer.read().decode())


def test_a_node_listens_on_three_ports_and_no_more(swarm: ProcessSwarm) -> None:
    for peer in swarm.peers:
        daemon = daemon_pid(peer)
        p2pd, trainer = find_p2pd(daemon), find_trainer(daemon)
        assert p2pd is not None and trainer is not None
        announced = int(peer.addresses()[0].split("/")[4])
        found = {process.pid: open_ports(process) for process in process_tree(daemon)}
        assert found.pop(p2pd.pid) == {("tcp", "127.0.0.1", announced)}
        own = {("tcp", "127.0.0.1", port) for port in (read_metrics_port(peer.folder), swarm.poll(peer)[0].direct_port)}
        assert found.pop(daemon) == own and len(own) == 2
        assert not any(found.values()), found
        assert not open_inet_sockets(trainer)


def test_the_sockets_of_a_node_are_for_its_owner_alone(swarm: ProcessSwarm) -> None:
    for peer in swarm.peers:
        folder = (peer.folder / "sockets").resolve()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        sockets = bound_paths(daemon_pid(peer))
        assert sockets, "gRPC's, at least"
        assert {path.parent for path in sockets} == {folder}


def bound_paths(daemon: int) -> set[Path]:
    """The Unix sockets with a place in the file system on which anything of this node listens."""
    sockets = [str(found.laddr) for process in process_tree(daemon) for found in process.net_connections(kind="unix")]
    return {Path(address) for address in sockets if address.startswith("/")}


def test_numbers_for_machines(swarm: ProcessSwarm) -> None:
    assert page(swarm, "/healthz").startswith("ok ")
    names = {line.split()[2] for line in page(swarm, "/metrics").splitlines() if line.startswith("# TYPE")}
    assert all(name.startswith("murmur_") for name in names)
    present = {name.removeprefix("murmur_").removesuffix("_total") for name in names}
    assert set(METRICS) - {"node_info"} <= present | {"node"}, sorted(names)


def test_a_page_in_a_browser_cannot_ask_by_a_name_of_its_own(swarm: ProcessSwarm) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        page(swarm, "/status", host="rebound.example")
    with refused.value as answer:
        assert answer.code == 400

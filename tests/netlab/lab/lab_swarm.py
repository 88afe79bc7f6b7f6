"""A scattered swarm: the real peers of a run, each at its own link of a laboratory.

They listen as the default says, so their records name loopback addresses beside the public one, as volunteers' do.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from node.commands.up.peer_process import PeerProcess
from node.monitoring.status import NodeStatus
from protocol.manifest.run import Manifest
from tests.netlab.lab.laboratory import Laboratory, Node
from tests.swarm.process_swarm import ProcessSwarm, isolated_processes, join_command

PORT = 4001
LISTEN = f"/ip4/0.0.0.0/tcp/{PORT}"


class LabPeer(PeerProcess):
    """It runs inside a node of the laboratory, and is asked there."""

    def __init__(self, name: str, folder: Path, command: Sequence[str], laboratory: Laboratory, node: Node) -> None:
        super().__init__(name, folder, command)
        self.laboratory = laboratory
        self.node = node

    def start(self, peers: Sequence[str]) -> None:
        with self.laboratory.inside(self.node):
            super().start(peers)

    def replace_module(self, module: str) -> None:
        """Run this module instead of the one that `-m` named, with the same arguments."""
        python, option, _, *words = self._command
        self._command = (python, option, module, *words)

    def public_addresses(self) -> tuple[str, ...]:
        """Its addresses that others on the internet can use."""
        return tuple(address for address in self.addresses() if f"/ip4/{self.node.address}/" in address)


class LabSwarm(ProcessSwarm):
    """A peer in each of the nodes."""

    def __init__(self, folder: Path, manifest: Manifest, laboratory: Laboratory, nodes: Sequence[Node]) -> None:
        self.laboratory = laboratory
        self.nodes = list(nodes)
        self.states: dict[str, set[str]] = {}  # those that were seen, by the digest of the chain that led to them
        super().__init__(folder, manifest, len(nodes))

    def start(self) -> None:
        self.start_first()
        introducer = self.lab_peers[0].public_addresses()
        for peer in self.peers[1:]:
            peer.start(introducer)

    @property
    def lab_peers(self) -> list[LabPeer]:
        return [peer for peer in self.peers if isinstance(peer, LabPeer)]

    def poll(self, *peers: PeerProcess) -> list[NodeStatus]:
        """One after the other: this thread can be in one node at a time."""
        chosen = [peer for peer in self.lab_peers if not peers or peer in peers]
        for peer in chosen:
            with self.laboratory.inside(peer.node):
                asyncio.run(peer.poll())
            if peer.status:
                self.states.setdefault(peer.status.digest, set()).add(peer.status.state_digest)
        return [peer.status for peer in chosen if peer.status]

    def highest_round(self, *peers: PeerProcess) -> int:
        """The latest round that any of them has applied."""
        return max(status.round for status in self.poll(*peers))

    def _make_peer(self, index: int, *more: str) -> PeerProcess:
        name = f"peer-{index}"
        home = self.run.parent / name
        command = join_command(self.run, home, "--name", name, "--verbose", *self._words(index), *more, listen=LISTEN)
        return LabPeer(name, home, command, self.laboratory, self.nodes[index])

    def _words(self, index: int) -> tuple[str, ...]:
        """More words of its command: in a pipeline it takes a stage by turns."""
        stages = self.manifest.pipeline.stages
        return () if stages == 1 else ("--stage", str(index % stages))


@contextlib.contextmanager
def running_lab_swarm(
    folder: Path, manifest: Manifest, laboratory: Laboratory, nodes: Sequence[Node]
) -> Iterator[LabSwarm]:
    """In its own world; dead at the end, whatever happened."""
    with isolated_processes():
        swarm = LabSwarm(folder, manifest, laboratory, nodes)
        try:
            yield swarm
        finally:
            swarm.kill()

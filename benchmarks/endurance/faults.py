"""Faults of machines and lines, one after the other, as a seed draws them."""

import random
from collections import Counter
from collections.abc import Callable

import psutil

from benchmarks.endurance.run_observer import RunObserver
from node.commands.up.peer_process import PeerProcess
from tests.netlab.lab.lab_swarm import LabPeer, LabSwarm
from tests.swarm.process_swarm import daemon_pid
from tests.swarm.processes import process_tree

PERIOD = 15.0  # seconds from one fault to the next
DURATION_RANGE = (4.0, 12.0)  # seconds that a machine sleeps, or a line is cut
MAX_ABSENT = 3
LAST_LINES = 60  # of the log of a peer that ended by itself
SPARED = 2  # peers that are never killed: what a daemon takes over the whole flight shows in them alone


class FaultInjector:
    """kill: daemon, trainer and p2pd at once. freeze: they stand still, as when a laptop sleeps. cut: nothing passes
    the line, and nobody is told. rejoin: one that was killed is started again."""

    def __init__(self, swarm: LabSwarm, watch: RunObserver, seed: int) -> None:
        self._swarm = swarm
        self._watch = watch
        self._random = random.Random(seed)
        self._next: float | None = None
        self._ending: list[tuple[float, PeerProcess, Callable[[], None]]] = []
        self._dead: list[PeerProcess] = []
        self.counts: Counter[str] = Counter()

    @property
    def absent(self) -> list[str]:
        """Of whom nothing is expected now."""
        return [peer.name for _, peer, _ in self._ending]

    def step(self, now: float) -> None:
        """SystemExit: a peer has ended that nobody killed."""
        for peer in self._swarm.lab_peers:
            if not peer.is_running and peer not in self._dead:
                raise SystemExit("\n".join([f"{peer.name} ended by itself:", *peer.log_tail(LAST_LINES)]))
        for entry in [entry for entry in self._ending if entry[0] <= now]:
            self._end(entry)
        if self._next is None or now >= self._next:
            if self._next is not None:
                self._inject(now)
            self._next = now + PERIOD

    def stop(self) -> None:
        """All are well again."""
        for entry in list(self._ending):
            self._end(entry)
        while self._dead:
            self._rejoin()

    def _inject(self, now: float) -> None:
        mortal = [peer for peer in self._swarm.lab_peers[:-SPARED] if self._is_healthy(peer)]
        kinds = [
            "freeze",
            "cut",
            *(["kill"] if mortal and len(self._dead) < MAX_ABSENT else []),
            *(["rejoin"] if self._dead else []),
        ]
        kind = self._random.choice(kinds)
        self.counts[kind] += 1
        if kind == "rejoin":
            return self._rejoin()
        victim = self._random.choice(
            mortal if kind == "kill" else list(filter(self._is_healthy, self._swarm.lab_peers))
        )
        self._watch.reset_standstill(victim.name)
        if kind == "kill":
            victim.kill()
            self._dead.append(victim)
        else:
            end = self._freeze(victim) if kind == "freeze" else self._cut(victim)
            self._ending.append((now + self._random.uniform(*DURATION_RANGE), victim, end))

    def _is_healthy(self, peer: PeerProcess) -> bool:
        return peer.is_running and peer.name not in self.absent

    def _freeze(self, victim: PeerProcess) -> Callable[[], None]:
        frozen = process_tree(daemon_pid(victim))
        for process in frozen:
            process.suspend()

        def thaw() -> None:
            for process in frozen:
                try:
                    process.resume()
                except psutil.NoSuchProcess:
                    continue

        return thaw

    def _cut(self, victim: LabPeer) -> Callable[[], None]:
        self._swarm.laboratory.cut(victim.node)
        return self._swarm.laboratory.heal

    def _rejoin(self) -> None:
        peer = self._dead.pop(0)
        self._watch.reset_standstill(peer.name)
        living = [other for other in self._swarm.lab_peers if self._is_healthy(other)]
        peer.start([address for other in living for address in other.public_addresses()[:1]])

    def _end(self, entry: tuple[float, PeerProcess, Callable[[], None]]) -> None:
        self._ending.remove(entry)
        entry[2]()
        self._watch.reset_standstill(entry[1].name)

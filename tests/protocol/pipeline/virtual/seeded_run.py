"""One seed: a swarm with faults at random times, and what must hold at its end."""

import random
from collections import Counter
from dataclasses import replace

from node.loop.stage_events import Draining
from node.simulation.virtual.stage import InvariantError
from protocol.identity import PeerId
from protocol.pipeline.messages import Key
from protocol.pipeline.server import StageServer
from tests.protocol.pipeline.virtual.faulty_world import FaultyWorld, Peer
from tests.protocol.pipeline.virtual.scenario import ACTIVATION, Scenario

FAULTS_END = 10.0
END = 1800.0  # where a fifth of all messages is lost
RELEASED_SECONDS = 50.0  # from the end of a microbatch until all servers know of it
FAULTS = (
    "kill",
    "kill",
    "kill trainer",
    "kill trainer",
    "cut",
    "slow",
    "kill owner",
    "break",
    "poison",
    "drain",
    "doubt",
)


def scenario_of(seed: int) -> Scenario:
    chance = random.Random(f"scenario {seed}")
    stages = chance.choice([2, 2, 3, 4])
    speeds = tuple(
        tuple(chance.choice([1.0, 2.0, 4.0, 8.0]) for _ in range(chance.randint(1, 3))) for _ in range(stages)
    )
    scenario = Scenario(
        speeds=speeds,
        in_flight=chance.choice([1, 4, 4]),
        quota=chance.choice([4, 8]),
        owners=chance.choice([1, 2, 2, 3]),
        step_size=chance.choice([1, 2, 4, 1000]),
        memory=chance.choice([5, 8, 40]) * ACTIVATION + 100,
        delay=chance.choice([0.01, 0.2]),
        loss=chance.choice([0.0, 0.0, 0.05, 0.2]),
        duplication=chance.choice([0.0, 0.2]),
        deadline=chance.choice([60.0, 600.0]),
        bandwidth=chance.choice([1e4, 1e6]),
    )
    # One more download for each task: if each fifth fails, some microbatch is made again too often.
    needs_tokens = scenario.loss < 0.2 and chance.choice([False, True])
    return replace(scenario, stages_need_tokens=needs_tokens, owners_send_tokens=needs_tokens)


class SeededRun:
    """One swarm under one seed."""

    def __init__(self, seed: int, faults: tuple[str, ...] = FAULTS, scenario: Scenario | None = None) -> None:
        self.seed = seed
        self.world = FaultyWorld(scenario or scenario_of(seed), seed)
        self._chance = random.Random(f"faults {seed}")
        if faults:
            for _ in range(self._chance.choice([0, 1, 2, 4])):
                kind = self._chance.choice(faults)
                self.world.clock.schedule(self._chance.uniform(0.1, FAULTS_END), lambda kind=kind: self._strike(kind))  # type: ignore[misc]

    def run(self) -> None:
        """Raise InvariantError if something is wrong under this seed."""
        try:
            self.world.run(FAULTS_END + 25)
            self._check_restarted_owners()
            self.world.run(END, self._is_over)
            self._check_end()
            self.world.run(self.world.clock.now + RELEASED_SECONDS)
            self._check_released()
            self.world.run(self.world.clock.now + self.world.scenario.deadline + 60)
            self._check_memory()
        except InvariantError as error:
            raise InvariantError(f"seed {self.seed}: {error}") from error

    # Faults

    def _strike(self, kind: str) -> None:
        world, chance = self.world, self._chance
        servers = [peer for peer in world.peers.values() if peer.is_alive]
        owners = [peer for peer in servers if peer.draws]
        if not servers or not owners:
            return
        server, owner, seconds = chance.choice(servers), chance.choice(owners), chance.uniform(0.5, 15.0)
        match kind:
            case "kill":
                self._kill(server, seconds)
            case "kill owner":
                self._kill(owner, seconds)
            case "kill trainer":
                world.kill_trainer(server)
            case "cut":
                link = frozenset((server.name, chance.choice(servers).name))
                world.cuts.add(link)
                world.clock.schedule(seconds, lambda: world.cuts.discard(link))
            case "slow":
                self._slow_down(server, seconds)
            case "break":
                self._break(server, seconds)
            case "poison":
                open_keys = sorted(key for key, end in world.begun.items() if end == "open")
                world.poisoned.update(chance.sample(open_keys, min(1, len(open_keys))))
            case "drain":
                self._drain(server, seconds)
            case "doubt" if owner is not server:
                name, other = chance.sample([owner.name, server.name], 2)
                self._doubt(name, other, seconds)

    def _kill(self, peer: Peer, seconds: float) -> None:
        for key, end in self.world.begun.items():
            if key.owner == peer.name and end == "open":
                self.world.begun[key] = "owner died"
        self.world.kill(peer)
        # A peer that comes back at once has the same name before anybody missed it.
        self.world.clock.schedule(seconds, lambda: self.world.revive(peer))

    def _slow_down(self, peer: Peer, seconds: float) -> None:
        peer.speed /= 10

        def recover() -> None:
            peer.speed *= 10

        self.world.clock.schedule(seconds, recover)

    def _break(self, peer: Peer, seconds: float) -> None:
        peer.is_broken = True

        def recover() -> None:
            peer.is_broken = False

        self.world.clock.schedule(seconds, recover)

    def _drain(self, peer: Peer, seconds: float) -> None:
        peer.process.post(Draining())
        self.world.publish()
        self.world.clock.schedule(seconds, lambda: self._kill(peer, 5.0))

    def _doubt(self, name: PeerId, other: PeerId, seconds: float) -> None:
        self.world.doubt(name, other)
        self.world.clock.schedule(seconds, lambda: self.world.trust(name, other))

    # Checks

    def _is_over(self) -> bool:
        return all(
            peer.is_alive and peer.next_serial >= self.world.scenario.quota and not peer.owner.open_serials
            for peer in self.world.peers.values()
            if peer.draws
        )

    def _check_end(self) -> None:
        world = self.world
        if not self._is_over():
            waiting = [key for key, end in world.begun.items() if end == "open"]
            raise InvariantError(f"deadlock: {len(waiting)} microbatches do not end")
        ends = Counter(world.begun.values())
        if ends["stalled"]:
            raise InvariantError(f"deadlock: {ends['stalled']} microbatches ended because they waited for too long")
        counts = [peer.owner.counts for peer in world.peers.values()]
        never_died = all(peer.starts == 1 for peer in world.peers.values() if peer.draws)
        if never_died and ends["done"] != sum(each.done for each in counts):
            raise InvariantError("owners count other results than there are")
        for key, end in world.begun.items():
            self._check_counted(key, end)
        if never_died:
            self._check_partly_counted(sum(each.partly_counted for each in counts))

    def _check_restarted_owners(self) -> None:
        """Check that nobody holds a step open, or memory, for a process that an owner's next one has replaced."""
        for peer, server in self._servers():
            for key in server.table.entries:
                if key.serial < self.world.peers[key.owner].first_serial:
                    raise InvariantError(f"{peer.name} still holds {key} of an earlier process of its owner")

    def _servers(self) -> list[tuple[Peer, StageServer]]:
        live = [peer for peer in self.world.peers.values() if peer.is_alive]
        return [(peer, server) for peer in live if (server := peer.process.loop.server) is not None]

    def _check_partly_counted(self, counted: int) -> None:
        """Check that owners count all of their dropped microbatches that some stages count and others do not."""
        stages = range(len(self.world.scenario.speeds))
        dropped = [key for key, end in self.world.begun.items() if end != "done"]
        partly = [key for key in dropped if 0 < sum(self.world.copies(stage, key) for stage in stages) < len(stages)]
        if len(partly) > counted:
            raise InvariantError(f"owners count {counted} partly counted microbatches where there are {len(partly)}")

    def _check_counted(self, key: Key, end: str) -> None:
        """Check that a microbatch that is done counts once at each stage, unless a death that is counted took it."""
        world = self.world
        for stage in range(len(world.scenario.speeds)):
            copies = world.copies(stage, key)
            if end == "done" and not copies and (stage, key) not in world.dead_additions:
                raise InvariantError(f"{key} is done, and stage {stage} does not count it")

    def _check_released(self) -> None:
        """Check that no server holds a step open, or memory, for a microbatch that has ended."""
        for peer, server in self._servers():
            for key in server.table.entries:
                raise InvariantError(f"{peer.name} still holds {key} after its end")

    def _check_memory(self) -> None:
        for peer, server in self._servers():
            if server.table.memory.used:
                raise InvariantError(f"{peer.name} still holds {server.table.memory.used} bytes")
            if server.table.unfinished:
                raise InvariantError(f"{peer.name} still holds places of tasks that have ended")
            if peer.process.held:
                raise InvariantError(f"{peer.name} still holds blobs of {list(peer.process.held)}")

"""One seed: a swarm with faults at random times, and what must hold at its end."""

import random
from collections import Counter
from dataclasses import replace

from protocol.identity import PeerId
from protocol.pipeline.messages import Key
from tests.protocol.pipeline.virtual.scenario import ACTIVATION, InvariantError, Peer, Scenario
from tests.protocol.pipeline.virtual.virtual_swarm import VirtualSwarm

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
        self.swarm = VirtualSwarm(scenario or scenario_of(seed), seed)
        self._chance = random.Random(f"faults {seed}")
        if faults:
            for _ in range(self._chance.choice([0, 1, 2, 4])):
                kind = self._chance.choice(faults)
                self.swarm.schedule(self._chance.uniform(0.1, FAULTS_END), lambda kind=kind: self._strike(kind))  # type: ignore[misc]

    def run(self) -> None:
        """Raise InvariantError if something is wrong under this seed."""
        try:
            self.swarm.run(FAULTS_END + 25)
            self._check_restarted_owners()
            self.swarm.run(END, self._is_over)
            self._check_end()
            self.swarm.run(self.swarm.now + RELEASED_SECONDS)
            self._check_released()
            self.swarm.run(self.swarm.now + self.swarm.scenario.deadline + 60)
            self._check_memory()
        except InvariantError as error:
            raise InvariantError(f"seed {self.seed}: {error}") from error

    # Faults

    def _strike(self, kind: str) -> None:
        swarm, chance = self.swarm, self._chance
        servers = [peer for peer in swarm.peers.values() if peer.server is not None]
        owners = [peer for peer in swarm.peers.values() if peer.owner is not None]
        if not servers or not owners:
            return
        server, owner, seconds = chance.choice(servers), chance.choice(owners), chance.uniform(0.5, 15.0)
        match kind:
            case "kill":
                self._kill(server, seconds)
            case "kill owner":
                self._kill(owner, seconds)
            case "kill trainer":
                swarm.kill_trainer(server)
            case "cut":
                link = frozenset((server.name, chance.choice([*owners, *servers]).name))
                swarm.cuts.add(link)
                swarm.schedule(seconds, lambda: swarm.cuts.discard(link))
            case "slow":
                self._slow_down(server, seconds)
            case "break":
                self._break(server, seconds)
            case "poison":
                open_keys = sorted(key for key, end in swarm.begun.items() if end == "open")
                swarm.poisoned.update(chance.sample(open_keys, min(1, len(open_keys))))
            case "drain":
                self._drain(server, seconds)
            case "doubt":
                name, other = chance.sample([owner.name, server.name], 2)
                self._doubt(name, other, seconds)

    def _kill(self, peer: Peer, seconds: float) -> None:
        for key, end in self.swarm.begun.items():
            if key.owner == peer.name and end == "open":
                self.swarm.begun[key] = "owner died"
        self.swarm.kill(peer)
        # A peer that comes back at once has the same name before anybody missed it.
        self.swarm.schedule(seconds, lambda: self.swarm.revive(peer))

    def _slow_down(self, peer: Peer, seconds: float) -> None:
        peer.speed /= 10

        def recover() -> None:
            peer.speed *= 10

        self.swarm.schedule(seconds, recover)

    def _break(self, peer: Peer, seconds: float) -> None:
        peer.is_broken = True

        def recover() -> None:
            peer.is_broken = False

        self.swarm.schedule(seconds, recover)

    def _drain(self, peer: Peer, seconds: float) -> None:
        from protocol.pipeline.server_events import Drain

        self.swarm.serve(peer, Drain())
        self.swarm.publish()
        self.swarm.schedule(seconds, lambda: self._kill(peer, 5.0))

    def _doubt(self, name: PeerId, other: PeerId, seconds: float) -> None:
        self.swarm.doubt(name, other)
        self.swarm.schedule(seconds, lambda: self.swarm.trust(name, other))

    # Checks

    def _is_over(self) -> bool:
        peers = self.swarm.peers.values()
        return all(
            peer.owner is not None and peer.next_serial >= self.swarm.scenario.quota and not peer.owner.open_serials
            for peer in peers
            if peer.stage is None
        )

    def _check_end(self) -> None:
        swarm = self.swarm
        if not self._is_over():
            waiting = [key for key, end in swarm.begun.items() if end == "open"]
            raise InvariantError(f"deadlock: {len(waiting)} microbatches do not end")
        ends = Counter(swarm.begun.values())
        if ends["stalled"]:
            raise InvariantError(f"deadlock: {ends['stalled']} microbatches ended because they waited for too long")
        counts = [peer.owner.counts for peer in swarm.peers.values() if peer.owner is not None]
        never_died = all(peer.life == 1 for peer in swarm.peers.values() if peer.stage is None)
        if never_died and ends["done"] != sum(each.done for each in counts):
            raise InvariantError("owners count other results than there are")
        for key, end in swarm.begun.items():
            self._check_counted(key, end)
        if never_died:
            self._check_partly_counted(sum(each.partly_counted for each in counts))

    def _check_restarted_owners(self) -> None:
        """Check that nobody holds a step open, or memory, for a process that an owner's next one has replaced."""
        for peer in self.swarm.peers.values():
            for key in peer.server.table.entries if peer.server is not None else ():
                if key.serial < self.swarm.peers[key.owner].first_serial:
                    raise InvariantError(f"{peer.name} still holds {key} of an earlier process of its owner")

    def _check_partly_counted(self, counted: int) -> None:
        """Check that owners count all of their dropped microbatches that some stages count and others do not."""
        stages = range(len(self.swarm.scenario.speeds))
        dropped = [key for key, end in self.swarm.begun.items() if end != "done"]
        partly = [key for key in dropped if 0 < sum(self.swarm.copies(stage, key) for stage in stages) < len(stages)]
        if len(partly) > counted:
            raise InvariantError(f"owners count {counted} partly counted microbatches where there are {len(partly)}")

    def _check_counted(self, key: Key, end: str) -> None:
        """Check that a microbatch that is done counts once at each stage, unless a death that is counted took it."""
        swarm = self.swarm
        for stage in range(len(swarm.scenario.speeds)):
            copies = swarm.copies(stage, key)
            if end == "done" and not copies and (stage, key) not in swarm.dead_additions:
                raise InvariantError(f"{key} is done, and stage {stage} does not count it")

    def _check_released(self) -> None:
        """Check that no server holds a step open, or memory, for a microbatch that has ended."""
        for peer in self.swarm.peers.values():
            for key in peer.server.table.entries if peer.server is not None else ():
                raise InvariantError(f"{peer.name} still holds {key} after its end")

    def _check_memory(self) -> None:
        for peer in self.swarm.peers.values():
            if peer.server is not None and peer.server.table.memory.used:
                raise InvariantError(f"{peer.name} still holds {peer.server.table.memory.used} bytes")
            if peer.server is not None and peer.server.table.unfinished:
                raise InvariantError(f"{peer.name} still holds places of tasks that have ended")
            if peer.blobs:
                raise InvariantError(f"{peer.name} still holds blobs of {list(peer.blobs)}")

"""Peers of a run that ends, in virtual time: records take a while, arrive out of turn, and peers die.

Whatever happens, every peer leaves, and a machine with the final model is there for as long as one is needed.
"""

import random
from dataclasses import dataclass, field

import pytest

from node.loop.actions import LeaveRun
from node.loop.departure import ARRIVAL_SECONDS, KEEPING_SECONDS, MIN_HANDOVER_SECONDS, Departure
from node.loop.options import LoopOptions, RoundOptions
from node.loop.peers.swarm_snapshot import PeerState, SwarmSnapshot
from node.loop.steering import Steering
from protocol.consensus.chain import Chain, ChainHead, ChainLog
from protocol.electorate import Electorate
from protocol.manifest.sections import TargetSection
from protocol.steering import REFERENCE_MANIFEST, RevisionLog

HEAD, BEFORE = ChainHead(8, b"h" * 32, 800), ChainHead(7, b"e" * 32, 700)
STATE = b"s" * 32
FINAL, EARLIER = PeerState(HEAD, STATE), PeerState(BEFORE, b"t" * 32)
EXPIRY = 15.0
TICK = 0.1
SEEDS = range(100)


@dataclass
class Machine:
    """A trainer, or the host: its record by version, and what it knows of the others."""

    name: str
    arrives_at: float  # with the final state
    dies_at: float
    departure: Departure | None = None
    seen: dict[str, tuple[int, PeerState, bool]] = field(default_factory=dict)  # version, state, has left
    left_at: float | None = None

    @property
    def is_trainer(self) -> bool:
        return self.departure is not None

    def record(self, now: float) -> tuple[int, PeerState, bool]:
        has_state = now >= self.arrives_at
        state = PeerState(*((HEAD, STATE) if has_state else (BEFORE, b"t" * 32)), is_trainer=self.is_trainer)
        return has_state + 2 * (self.left_at is not None), state, self.left_at is not None


class Ending:
    """One seeded end of a run."""

    def __init__(self, seed: int, hosts: int | None = None, forgets_left: bool = False) -> None:
        self.random = draw = random.Random(seed)
        trainers, hosts = draw.randint(1, 4), draw.randint(0, 1) if hosts is None else hosts
        self.now = 0.0
        self.forgets_left = forgets_left
        steering = Steering(
            REFERENCE_MANIFEST.model_copy(update={"target": TargetSection(rounds=8)}),
            Chain(HEAD, ChainLog(Electorate.at_genesis())), RevisionLog(),
        )  # fmt: skip
        self.machines = [Machine(f"host-{index}", draw.uniform(1, 10), 1e9) for index in range(hosts)]
        for index in range(trainers):
            name, dies = f"peer-{index}", draw.uniform(0, 5) if draw.random() < 0.2 else 1e9
            options = RoundOptions(name, lambda number: None, None)  # type: ignore[arg-type, return-value]
            loop_options = LoopOptions(options, steering, expiry=EXPIRY, has_contacts=True)
            self.machines.append(Machine(name, draw.uniform(0, 3), dies, Departure(loop_options)))

    def live(self) -> list[Machine]:
        return [machine for machine in self.machines if machine.left_at is None and self.now < machine.dies_at]

    def staying(self) -> list[Machine]:
        return [machine for machine in self.live() if machine.is_trainer]

    def run(self) -> None:
        """Let time pass until every trainer has left or died."""
        began: set[str] = set()
        while self.staying():
            for machine in self.staying():
                self._gossip(machine)
                if self.now >= machine.arrives_at and machine.name not in began:
                    began.add(machine.name)
                    assert machine.departure is not None
                    machine.departure.begin(HEAD, STATE, False, self.now)
                self._advance(machine)
            self.now += TICK if self.now < 2 * ARRIVAL_SECONDS + MIN_HANDOVER_SECONDS else 600.0
            assert self.now < 2 * KEEPING_SECONDS, f"{[machine.name for machine in self.staying()]} never leave"

    def _gossip(self, machine: Machine) -> None:
        """Learn the newest record of each other machine, now or later; it may be the first one that says goodbye."""
        for other in self.machines:
            version = other.record(self.now)
            known = machine.seen.get(other.name, (-1, EARLIER, False))
            is_there = other.left_at is None or self.now - other.left_at < EXPIRY
            if other is not machine and version[0] > known[0] and is_there and self.random.random() < 0.3:
                machine.seen[other.name] = version

    def _advance(self, machine: Machine) -> None:
        assert machine.departure is not None
        dead = {other.name for other in self.machines if self.now > other.dies_at + EXPIRY}
        peers = {name: state for name, (_, state, left) in machine.seen.items() if not left and name not in dead}
        left = {name: state for name, (_, state, left) in machine.seen.items() if left and not self.forgets_left}
        machine.departure.set_snapshot(SwarmSnapshot({machine.name: FINAL, **peers}, left))
        if LeaveRun() in machine.departure.advance(self.now):
            machine.left_at = self.now


@pytest.mark.parametrize("seed", SEEDS)
def test_every_peer_leaves_and_none_takes_the_only_model_with_it(seed: int) -> None:
    ending = Ending(seed)
    ending.run()
    holders = [machine for machine in ending.machines if machine.dies_at >= machine.arrives_at]
    for machine in ending.machines:
        others = [other for other in holders if other is not machine]
        if machine.left_at is not None and machine.left_at < KEEPING_SECONDS:
            assert any(other.arrives_at <= machine.left_at for other in others), f"seed {seed}: {machine.name}"
        if machine.is_trainer and len(others) and all(other.dies_at > 1e6 for other in ending.machines):
            assert machine.left_at is not None and machine.left_at < MIN_HANDOVER_SECONDS, f"seed {seed}"
    hosts = [machine for machine in ending.machines if not machine.is_trainer]
    ends = [machine.left_at for machine in ending.machines if machine.left_at is not None]
    if hosts and ends and min(other.dies_at for other in ending.machines) > 1e6:
        assert max(ends) < max(hosts[0].arrives_at, 3.0) + 3.0, f"seed {seed}: a host costs seconds only"


def test_without_the_records_of_those_that_left_some_peer_waits_for_a_day() -> None:
    late = 0
    for seed in SEEDS:
        ending = Ending(seed, hosts=0, forgets_left=True)
        ending.run()
        others = len(ending.machines) > 1 and all(machine.dies_at > 1e6 for machine in ending.machines)
        late += others and any((machine.left_at or 0.0) >= KEEPING_SECONDS for machine in ending.machines)
    assert late, "the race that `left` is for does not occur"

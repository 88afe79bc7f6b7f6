"""Seeded swarms with exact steps: whatever dies, each microbatch of an applied step counts once at each stage."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from node.loop.stage_events import PeersSeen
from node.loop.stage_modes import ExactMode
from node.simulation.virtual.stage import InvariantError
from protocol.pipeline import ledger as ledgers
from protocol.pipeline.exact import Credibility, OwnerProgress, StepAgreement, StepReports
from protocol.pipeline.ledger import StepLedger
from protocol.pipeline.routing import StagePeer, _Route
from protocol.pipeline.steps import ExactSteps
from tests.protocol.pipeline.virtual.bugs import frees_what_a_trainer_reads, waits_for_earlier_processes_of_owners
from tests.protocol.pipeline.virtual.exact_world import ExactWorld, Liar
from tests.protocol.pipeline.virtual.faulty_world import Peer
from tests.protocol.pipeline.virtual.scenario import ACTIVATION, Scenario
from tests.slices import sliced

SEEDS, LONG_SEEDS, BATCH = 20, 2000, 100
STEPS, STEPS_IN_PEACE = 4, 2
FAULTS_END, END, STILL = 8.0, 1000.0, 150.0  # seconds; a step may take 50 where messages are lost
FAULTS = ("kill", "kill", "die", "kill trainer", "kill trainer", "cut", "slow", "break", "doubt")
Bug = Callable[[pytest.MonkeyPatch], None]


def scenario_of(seed: int) -> tuple[Scenario, int]:
    chance = random.Random(f"exact scenario {seed}")
    stages = chance.choice([2, 2, 3])
    speeds = tuple(tuple(chance.choice([4.0, 8.0, 16.0]) for _ in range(chance.randint(2, 3))) for _ in range(stages))
    scenario = Scenario(
        speeds=speeds,
        in_flight=chance.choice([2, 4]),
        memory=chance.choice([8, 20, 40]) * ACTIVATION + 100,
        delay=chance.choice([0.01, 0.1]),
        loss=chance.choice([0.0, 0.0, 0.05, 0.1]),
        duplication=chance.choice([0.0, 0.2]),
        bandwidth=chance.choice([1e4, 1e6]),
    )
    return scenario, chance.choice([4, 9, 16])


class ExactRun:
    """One swarm under one seed."""

    def __init__(self, seed: int, faults: tuple[str, ...] = FAULTS) -> None:
        self.seed = seed
        scenario, count = scenario_of(seed)
        self.world = ExactWorld(scenario, seed, count)
        self._chance = random.Random(f"exact faults {seed}")
        self.fault_count = self._open_faults = self._chance.choice([0, 1, 2, 4, 8]) if faults else 0
        self._steps_at_peace = 0  # when the last fault had ended
        for _ in range(self.fault_count):
            kind = self._chance.choice(faults)
            self.world.clock.schedule(self._chance.uniform(0.1, FAULTS_END), lambda kind=kind: self._strike(kind))  # type: ignore[misc]

    def run(self) -> None:
        """Raise InvariantError if something is wrong under this seed."""
        try:
            self.world.run(END, lambda: self._is_over() or self._is_still or self._has_many_void_rounds)
            if self._has_many_void_rounds:
                raise InvariantError(f"{self.world.void_rounds} void rounds after {self.fault_count} faults")
            if not self._is_over():
                raise InvariantError(f"deadlock: {self.world.steps} steps in {self.world.clock.now:g} s")
        except InvariantError as error:
            raise InvariantError(f"seed {self.seed}: {error}") from error

    def _is_over(self) -> bool:
        """Return whether there was a number of steps, some of them after all faults."""
        return not self._open_faults and self.world.steps >= max(STEPS, self._steps_at_peace + STEPS_IN_PEACE)

    @property
    def _is_still(self) -> bool:
        return self.world.clock.now > self.world.round_ended + STILL

    @property
    def _has_many_void_rounds(self) -> bool:
        return self.world.void_rounds > MAX_VOID * (self.fault_count + self.world.scenario.loss * LOSSES)

    def _strike(self, kind: str) -> None:
        world, chance = self.world, self._chance
        peer, other = chance.sample(list(world.peers.values()), 2)
        seconds = chance.uniform(0.5, 12.0)
        match kind:
            case "kill":
                world.kill(peer)
                self._end_later(seconds, lambda: world.revive(peer))
            case "die":
                world.remove(peer)
                self._end_later(0.0, lambda: None)
            case "kill trainer":
                world.kill_trainer(peer)
                self._end_later(0.0, lambda: None)
            case "cut":
                link = frozenset((peer.name, other.name))
                world.cuts.add(link)
                self._end_later(seconds, lambda: world.cuts.discard(link))
            case "doubt":
                world.doubt(peer.name, other.name)
                self._end_later(seconds, lambda: world.trust(peer.name, other.name))
            case "slow":
                peer.speed /= 10
                self._end_later(seconds, lambda: setattr(peer, "speed", peer.speed * 10))
            case "break":
                peer.is_broken = True
                self._end_later(seconds, lambda: setattr(peer, "is_broken", False))

    def _end_later(self, seconds: float, undo: Callable[[], object]) -> None:
        """End a fault after a while."""

        def end() -> None:
            undo()
            self._open_faults -= 1
            self._steps_at_peace = self.world.steps

        self.world.clock.schedule(seconds, end)


MAX_VOID, LOSSES = 3, 40


# Bugs.


def no_void_rule(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ledgers, "covers_step", lambda found, count: True)


def each_stage_judges_alone(patch: pytest.MonkeyPatch) -> None:
    def hear(self: ExactWorld, peer: Peer, number: int) -> None:
        stage = peer.stage
        decided = self._decided.get(number, {})
        if stage in decided:
            self._apply(peer, number, decided[stage])

    patch.setattr(ExactWorld, "_hear_decision", hear)


def nobody_takes_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OwnerProgress, "passes_at", lambda self, owner, rank: math.inf)


def dead_lives_count(patch: pytest.MonkeyPatch) -> None:
    """An acknowledgement of a process that has died since is honoured, and no other owner takes over."""
    patch.setattr(
        StepAgreement, "_has_acknowledgement", lambda self, stage, number: (stage, number) in self._acknowledged
    )
    nobody_takes_over(patch)


def repeated_tasks_add_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ExactSteps, "has_counted", lambda self, key: False)


def sums_outlive_their_round(patch: pytest.MonkeyPatch) -> None:
    begin = StepAgreement.begin

    def carry(self: StepAgreement, round_number: int, life: int, now: float) -> None:
        kept = self.ledger
        begin(self, round_number, life, now)
        self.ledger = kept

    patch.setattr(StepAgreement, "begin", carry)


def nothing_is_subtracted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepAgreement, "_doubles", lambda self: StepLedger(self.count))


def sealed_servers_never_open(patch: pytest.MonkeyPatch) -> None:
    change = StepAgreement._seal_or_open
    patch.setattr(
        StepAgreement, "_seal_or_open", lambda self, now: None if self.phase == "sealed" else change(self, now)
    )


def doomed_rounds_go_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepReports, "is_void", lambda self, number: False)


def owners_never_change(patch: pytest.MonkeyPatch) -> None:
    set_peers_truly = StepAgreement.set_peers

    def set_peers(self: StepAgreement, stages: object, owners: object, standing: object = None) -> None:
        set_peers_truly(self, stages, self._owners or owners, standing)  # type: ignore[arg-type]

    patch.setattr(StepAgreement, "set_peers", set_peers)
    nobody_takes_over(patch)


def decided_stages_lose_what_their_dead_had(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepReports, "covered_stages", lambda self, number: frozenset())


def loops_that_see_nobody_own_everything(patch: pytest.MonkeyPatch) -> None:
    set_peers_truly = ExactMode.set_peers

    def set_peers(self: ExactMode, seen: PeersSeen, us: StagePeer, is_resting: bool) -> None:
        set_peers_truly(self, seen, us, is_resting)
        if not any(seen.stages):
            self.agreement.set_peers([{} for _ in seen.stages], [us.peer])

    patch.setattr(ExactMode, "set_peers", set_peers)


def exact_steps_have_no_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ExactMode, "next_deadline", lambda self: None)


# The old rules, which liars use.


def records_decide(patch: pytest.MonkeyPatch) -> None:
    """A record counts without the certificate of its decision."""
    believe = ExactWorld.believe

    def take(
        self: ExactWorld,
        stage: int,
        number: int,
        *,
        is_complete: bool,
        has_certificate: bool,
        lacking: StepLedger | None = None,
    ) -> None:
        believe(self, stage, number, is_complete=is_complete, has_certificate=True, lacking=lacking)

    patch.setattr(ExactWorld, "believe", take)


def announced_keys_own_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Each announced key owns its share, and nobody takes over from it."""
    patch.setattr(ExactWorld, "known_standing", lambda self: None)
    nobody_takes_over(patch)


def keys_without_standing_own(patch: pytest.MonkeyPatch) -> None:
    """Each announced key owns its share, as before the first commit; others take over from it."""
    patch.setattr(ExactWorld, "known_standing", lambda self: None)


def statements_of_all_count(patch: pytest.MonkeyPatch) -> None:
    """The word of any announced key counts."""

    def believe(self: StepAgreement) -> None:
        self._live, self._coverage = self._known, None

    patch.setattr(StepAgreement, "_believe", believe)


def false_statements_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Credibility, "judge", lambda self, reports: None)


def open_servers_are_waited_for_without_end(patch: pytest.MonkeyPatch) -> None:
    def may_offer(self: StepAgreement, now: float) -> bool:
        return all(each.phase != "open" for each in self._valid_statements(self._stage).values())

    patch.setattr(StepAgreement, "_may_offer", may_offer)


BUGS: list[tuple[Bug, int, str]] = [  # with a seed that shows it, and the word by which it does
    (no_void_rule, 19, "otherwise than once"),
    (each_stage_judges_alone, 18, "apart"),
    (dead_lives_count, 25, "deadlock"),
    (repeated_tasks_add_again, 0, "otherwise than once"),
    (sums_outlive_their_round, 2, "void rounds"),
    (doomed_rounds_go_on, 104, "deadlock"),
    (owners_never_change, 0, "deadlock"),
    (waits_for_earlier_processes_of_owners, 519, "deadlock"),
    (decided_stages_lose_what_their_dead_had, 292, "deadlock"),
    (loops_that_see_nobody_own_everything, 6, "void rounds"),
    (exact_steps_have_no_deadline, 1, "missed a deadline"),
    (frees_what_a_trainer_reads, 0, "without its inputs"),
]


@pytest.mark.slow
def test_every_microbatch_counts_once_at_each_stage_whatever_dies() -> None:
    voids = 0
    for seed in range(SEEDS):
        run = ExactRun(seed)
        run.run()
        voids += run.world.void_rounds
    assert voids, "no seed made a round void, so nothing was tried"


@pytest.mark.seeds
@pytest.mark.parametrize("first", range(SEEDS, LONG_SEEDS, BATCH))
def test_thousands_of_seeds(first: int) -> None:
    for seed in range(first, first + BATCH):
        ExactRun(seed).run()


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "seed", "word"), BUGS, ids=lambda value: getattr(value, "__name__", None))
def test_each_bug_is_found(bug: Bug, seed: int, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"seed {seed}")
    bug(monkeypatch)
    assert word in outcome(seed)
    monkeypatch.undo()
    assert outcome(seed) == "", "the same seed without the bug"


LIARS: list[tuple[Liar, Bug]] = [
    ("voids", records_decide),
    ("announces", announced_keys_own_for_ever),
    ("claims", statements_of_all_count),
]
FIRST_ROUND = 0.15  # of the steps: before a stage has a commit, its admitted trainers count, and so does the liar
LIAR_SECONDS, LIAR_SEEDS, LEAST_PACE = 90.0, (1, 2), 0.8
CONTROL_SECONDS = 30.0  # in which an honest swarm makes ten steps


def steps_of(seed: int, liar: Liar | None, seconds: float = LIAR_SECONDS) -> int:
    """Return how many steps a swarm without faults makes, and check that each of them is one."""
    scenario, count = scenario_of(seed)
    world = ExactWorld(replace(scenario, loss=0.0), seed, count, liar)
    world.run(seconds)
    print(f"seed {seed}, {liar}: {world.steps} steps, {world.void_rounds} void rounds")
    return world.steps


@cache  # of our own rules: call it before a test breaks one
def honest_steps(seed: int) -> int:
    return steps_of(seed, None)


@pytest.mark.slow
@pytest.mark.parametrize("seed", sliced(LIAR_SEEDS, 1))
@pytest.mark.parametrize(("liar", "old_rule"), LIARS, ids=["voids", "announces", "claims"])
def test_one_free_key_neither_voids_steps_nor_stops_them(
    liar: Liar, old_rule: Bug, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, beside = honest_steps(seed), steps_of(seed, liar)
    assert honest >= 10 and beside >= (LEAST_PACE - FIRST_ROUND * (liar == "claims")) * honest
    old_rule(monkeypatch)
    assert steps_of(seed, liar, CONTROL_SECONDS) == 0, "the control"


def silent_servers_get_tasks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Route, "answers", True)


@pytest.mark.slow
def test_no_step_waits_for_servers_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, beside = honest_steps(2), steps_of(2, "is silent")
    assert honest >= 10 and beside >= LEAST_PACE * honest
    silent_servers_get_tasks(monkeypatch)
    assert steps_of(2, "is silent") < LEAST_PACE * honest, "the control"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("liar", "old_rule"),
    [
        ("claims as a member", false_statements_are_forgotten),
        ("waits as a member", open_servers_are_waited_for_without_end),
    ],
    ids=["claims", "waits"],
)
def test_false_statements_of_a_member_void_ever_fewer_steps(
    liar: Liar, old_rule: Bug, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = steps_of(1, liar, 150.0)
    old_rule(monkeypatch)
    assert beside >= 10 and steps_of(1, liar, CONTROL_SECONDS) == 0, "the control makes none"


@pytest.mark.slow
def test_idle_owner_costs_a_grace_in_ever_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A liar with standing that begins nothing: first its microbatches pass to others, then it owns none."""
    keys_without_standing_own(monkeypatch)
    remembered = steps_of(2, "announces", 150.0)
    monkeypatch.setattr(OwnerProgress, "active", lambda self, owners, round_number: owners)
    assert remembered >= 2 * steps_of(2, "announces", 150.0) > 0


def outcome(seed: int) -> str:
    try:
        ExactRun(seed).run()
    except InvariantError as broken:
        return str(broken)
    return ""

"""Stage loops with exact steps in virtual time: each peer owns microbatches, serves a stage, and contributes.

Rounds are those of a notary: a stage decides once all its live peers have contributed, or after a grace, with what a
live peer still holds. What each sum really contains is counted beside the loops, and checked at every step that is
applied.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from node.loop.stage_events import StageAnchorApplied, StageContributed, StatementReceived, TrainerReady
from node.loop.stage_loop import EXACT_PAUSE, StageLoop
from node.loop.stage_modes import ExactMode
from node.simulation.virtual.stage import InvariantError
from protocol.identity import PeerId
from protocol.pipeline import ledger as ledgers
from protocol.pipeline import server_events
from protocol.pipeline.exact import Phase, Statement, StepAgreement, StepDecisions, StepReports
from protocol.pipeline.ledger import StepLedger
from protocol.pipeline.messages import Key, Task
from protocol.pipeline.microbatch import OwnerSettings
from protocol.pipeline.owner import ASK_SECONDS
from protocol.pipeline.routing import StagePeer
from tests.protocol.pipeline.virtual.faulty_world import FaultyTrainer, FaultyWorld, Peer
from tests.protocol.pipeline.virtual.scenario import ACTIVATION, Scenario

GRACE = 2.0
LIAR = "a liar"
Liar = Literal["announces", "is silent", "voids", "claims", "claims as a member", "waits as a member"]
CLAIM_SECONDS = 0.5
FALSE_ROUNDS = 16  # in the record of a liar
LATE_ROUNDS = 8


@dataclass
class Sum:
    """What a trainer has really added, and the ledger that it keeps."""

    round: int
    ledger: StepLedger
    contents: Counter[int] = field(default_factory=Counter)


@dataclass
class Contribution:
    """A sum that was offered; `holders` have its bytes."""

    total: Sum
    holders: set[PeerId]


class SumTrainer(FaultyTrainer):
    """Keeps the sum of an exact step."""

    world: "ExactWorld"

    def __init__(self, peer: Peer, world: "ExactWorld", round_number: int) -> None:
        super().__init__(peer, world)
        self.total = Sum(round_number, StepLedger(world.step_count))

    @property
    def round(self) -> int:
        return self.total.round

    def begin_round(self, number: int) -> None:
        """Take over the weights of a round."""
        self.total = Sum(number, StepLedger(self.world.step_count))

    def is_valid(self, task: Task) -> bool:
        return super().is_valid(task) and self.round == task.round

    def count(self, order: server_events.Compute) -> None:
        number, total = order.task.number, self.total
        if number is None or not (order.adds or order.takes_away):
            return
        changed = StepLedger.of(self.world.step_count, (number,))
        total.contents[number] += 1 if order.adds else -1
        total.ledger = total.ledger | changed if order.adds else total.ledger - changed

    def step(self, stepped: Callable[[], None]) -> None:
        process, total = self.peer.process, self.total
        if process.loop.round == total.round:
            process.post(StageContributed(total.round, total.ledger.to_bytes()))
            self.world.offer(self.peer, total)
        stepped()

    def drop_sum(self) -> None:
        self.begin_round(self.round)


class ExactWorld(FaultyWorld):
    """All peers, the network, and the rounds of all stages; a step has `count` microbatches.

    `liar`: "announces": a key of stage 0 that does nothing else; "is silent": three such keys, and calls to them end at
    their deadlines; "voids": its record says in addition that its stage decided all rounds without their steps;
    "claims": it states that it counts all microbatches of each step, and "as a member" it has standing; "waits": it
    states for ever that it may add some.
    """

    def __init__(self, scenario: Scenario, seed: int, count: int, liar: Liar | None = None) -> None:
        self.step_count = count
        self.liar = liar
        self.decisions = StepDecisions(len(scenario.speeds), count)
        self.steps = 0
        self.void_rounds = 0
        self.round_ended = 0.0  # when the newest round did
        self._offered: dict[tuple[int, int], dict[PeerId, Contribution]] = {}  # by stage and round
        self._decided: dict[int, dict[int, bool]] = {}
        self._applied: dict[tuple[int, int], bool] = {}
        self._gone: set[PeerId] = set()
        super().__init__(replace(scenario, step_size=count), seed)
        if liar is not None and liar.startswith(("claims", "waits")):
            self.clock.schedule(CLAIM_SECONDS, self._claim)

    def is_owner(self, index: int) -> bool:
        return True

    # Peers.

    def start(self, peer: Peer) -> None:
        peer.starts += 1
        peer.first_serial = peer.next_serial
        number = max([0, *(number + 1 for stage, number in self._applied if stage == peer.stage)])
        self.start_process(peer, self.build_loop(peer), SumTrainer(peer, self, number))
        self._report_ready(peer, number)

    def build_loop(self, peer: Peer) -> StageLoop:
        settings = OwnerSettings(
            peer.name, self.scenario.in_flight, activation_bytes=ACTIVATION, round_pause=EXACT_PAUSE
        )
        agreement = StepAgreement(peer.name, self.runs, peer.stage, self.step_count)
        return self.build_stage_loop(peer, settings, ExactMode(agreement, peer.stage, sequences=1))

    def _report_ready(self, peer: Peer, number: int) -> None:
        """Report a trainer that starts, and repeat its contribution.

        Before the first checkpoint none is on disk, so another one is made.
        """
        place = peer.stage, number
        contribution = self._offered.get(place, {}).get(peer.name) if number else None
        repeats = contribution is not None and not self._is_decided(place)
        steps = self._exact_step(place)
        peer.process.post(TrainerReady(number, self.wall_ms, repeats=repeats, exact_step=steps))
        if contribution is not None and repeats:
            peer.process.post(StageContributed(number, contribution.total.ledger.to_bytes()))
            self._spread(place, peer, contribution)

    def _exact_step(self, place: tuple[int, int]) -> int:
        """Return how many steps a stage has applied before a round."""
        return sum(
            counts for (stage, number), counts in self._applied.items() if stage == place[0] and number < place[1]
        )

    def on_draw(self, peer: Peer, key: Key) -> None:
        peer.next_serial = key.serial + 1

    def remove(self, peer: Peer) -> None:
        """Kill a peer for good, if its stage has another one now."""
        if any(mate is not peer for mate in self._mates(peer.stage)):
            self.kill(peer)
            self._gone.add(peer.name)

    def revive(self, peer: Peer) -> None:
        if peer.name not in self._gone:
            super().revive(peer)

    def kill_trainer(self, peer: Peer) -> None:
        if peer.is_alive:
            number = self._trainer(peer).round
            peer.process.replace_trainer(SumTrainer(peer, self, number))
            self._report_ready(peer, number)

    def _trainer(self, peer: Peer) -> SumTrainer:
        trainer = peer.process.trainer
        assert isinstance(trainer, SumTrainer)
        return trainer

    def step_reports(self) -> StepReports:
        newest = max(self._decided, default=0)
        for number in range(newest, newest + FALSE_ROUNDS) if self.liar == "voids" else ():
            self.believe(0, number, is_complete=False, has_certificate=False)
        return self.decisions.reports()

    def believe(
        self, stage: int, number: int, *, is_complete: bool, has_certificate: bool, lacking: StepLedger | None = None
    ) -> None:
        """Look at what a record says of a round: it counts if the peer has shown the certificate."""
        if has_certificate:
            self.decisions.note(stage, number, is_complete, lacking or StepLedger(self.step_count))

    def announced(self) -> list[tuple[int, StagePeer]]:
        number = max([0, *(number + 1 for _, number in self._applied)])
        if self.liar == "is silent":
            keys = [LIAR, f"{LIAR} 1", f"{LIAR} 2"]
            return [(0, StagePeer(key, 1, number, rate=16.0, answers=False)) for key in keys]
        return [(0, StagePeer(LIAR, 1, number, rate=16.0))] if self.liar else []

    def silent_seconds(self, peer: PeerId, delay: float) -> float:
        return ASK_SECONDS if self.liar == "is silent" and peer.startswith(LIAR) else delay

    def _claim(self) -> None:
        """Let the liar state something false to all others, and go on with that."""
        self.clock.schedule(CLAIM_SECONDS, self._claim)
        number = self.announced()[0][1].round
        ledger = StepLedger(self.step_count) if self.liar == "waits as a member" else StepLedger.full(self.step_count)
        phase: Phase = "open" if self.liar == "waits as a member" else "sealed"
        for peer in self.peers.values():
            version = int(self.clock.now / CLAIM_SECONDS)
            if peer.is_alive:
                peer.process.post(StatementReceived(LIAR, Statement(self.runs[0], number, 1, version, ledger, phase)))

    def known_standing(self) -> frozenset[PeerId] | None:
        """Return those who contributed to one of the last commits of their stage; all of a stage before its first."""
        found = {peer.name for peer in self.peers.values() if not self._has_commit(peer.stage)}
        is_member = self.liar is not None and self.liar.endswith("as a member")
        found |= set() if self._has_commit(0) and not is_member else {LIAR}
        newest = max(self._decided, default=0)
        for (stage, number), offered in self._offered.items():
            if number > newest - LATE_ROUNDS and self._is_decided((stage, number)):
                found |= offered.keys()
        return frozenset(found)

    def _has_commit(self, stage: int) -> bool:
        return any(stage in stages for stages in self._decided.values())

    def learn(self, peer: Peer) -> None:
        super().learn(peer)
        if peer.is_alive:
            self._hear_decision(peer, self._trainer(peer).round)

    # Rounds.

    def offer(self, peer: Peer, total: Sum) -> None:
        """Contribute to the round of a sum."""
        copy = Sum(total.round, total.ledger, Counter(total.contents))
        self._spread((peer.stage, total.round), peer, Contribution(copy, {peer.name}))

    def _spread(self, place: tuple[int, int], peer: Peer, contribution: Contribution) -> None:
        """Let the others of the stage fetch a contribution, and decide the round once all have offered."""
        if self._is_decided(place):
            return
        offered = self._offered.setdefault(place, {})
        if not offered:
            self.clock.schedule(GRACE, partial(self._decide, place))
        offered[peer.name] = contribution
        contribution.holders.add(peer.name)
        for mate in self._mates(peer.stage):
            if self.is_linked(peer.name, mate.name):
                self.clock.schedule(4 * self.latency(), partial(self._fetch_contribution, peer, mate, contribution))
        self.clock.schedule(8 * self.scenario.delay, partial(self._decide_if_all_offered, place))

    def _fetch_contribution(self, peer: Peer, mate: Peer, contribution: Contribution) -> None:
        if peer.is_alive and mate.is_alive:
            contribution.holders.add(mate.name)

    def _is_decided(self, place: tuple[int, int]) -> bool:
        return place[0] in self._decided.get(place[1], {})

    def _mates(self, stage: int) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.stage == stage and peer.is_alive]

    def _decide_if_all_offered(self, place: tuple[int, int]) -> None:
        wanted = {peer.name for peer in self._mates(place[0]) if self._trainer(peer).round == place[1]}
        if self._offered[place].keys() >= wanted:
            self._decide(place)

    def _decide(self, place: tuple[int, int]) -> None:
        stage, number = place
        alive = {peer.name for peer in self._mates(stage)}
        left = [each for each in self._offered[place].values() if each.holders & alive]
        if self._is_decided(place):
            return
        if not left:
            self._offered[place].clear()  # all contributions died with their owners
            return
        decided = self._decided.setdefault(number, {})
        decided[stage] = ledgers.covers_step([each.total.ledger.to_bytes() for each in left], self.step_count)
        lacking = StepLedger.full(self.step_count)
        for each in left:
            lacking -= each.total.ledger
        self.believe(stage, number, is_complete=decided[stage], has_certificate=True, lacking=lacking)
        self._offered[place] = {name: each for name, each in self._offered[place].items() if each in left}
        for peer in self.peers.values():
            self.clock.schedule(5 * self.latency(), partial(self.learn, peer))

    def _hear_decision(self, peer: Peer, number: int) -> None:
        own = self._decided.get(number, {}).get(peer.stage)
        verdict = self.step_reports().verdict(number, {}) if own is not None else None
        if verdict is not None:
            self._apply(peer, number, verdict)

    def _apply(self, peer: Peer, number: int, counts: bool) -> None:
        """Let the trainer take over the weights after a round, and a moment later its daemon know."""
        if (peer.stage, number) not in self._applied:
            self._applied[peer.stage, number] = counts
            self.round_ended = self.clock.now
            self._check_step(peer.stage, number, counts)
        trainer = self._trainer(peer)
        trainer.begin_round(number + 1)
        self.clock.schedule(self.chance.uniform(0, 0.05), partial(self._report_anchor, peer, trainer, number + 1))

    def _report_anchor(self, peer: Peer, trainer: SumTrainer, number: int) -> None:
        if peer.is_alive and peer.process.trainer is trainer:
            peer.process.post(StageAnchorApplied(number, self.wall_ms, self._exact_step((peer.stage, number))))
            self.learn(peer)

    def _check_step(self, stage: int, number: int, counts: bool) -> None:
        verdicts = {self._applied[place] for place in self._applied if place[1] == number}
        if len(verdicts) > 1:
            raise InvariantError(f"stages are apart: round {number} counts at some of them only")
        if not counts:
            self.void_rounds += stage == 0
            return
        self.steps += stage == 0
        total = Counter[int]()
        for contribution in self._offered[stage, number].values():
            total.update(contribution.total.contents)
        wrong = [each for each in range(self.step_count) if total[each] != 1]
        if wrong:
            raise InvariantError(f"the step of round {number} counts {wrong} otherwise than once at stage {stage}")

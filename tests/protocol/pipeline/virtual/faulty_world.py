"""The product's stage loops on faulty links: delays, losses, deaths, restarts, slow and broken machines.

Every peer serves a stage, and some of them own microbatches too. The trainers compute nothing: they keep a tally of
what their weights would contain.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from node.loop.stage_events import (
    DeadlinePassed,
    PeersSeen,
    RestingChanged,
    StageAction,
    StageContributed,
    StageEvent,
    TrainerReady,
)
from node.loop.stage_loop import StageLoop
from node.loop.stage_modes import LocalMode
from node.simulation.virtual.network import VirtualClock
from node.simulation.virtual.stage import Computation, InvariantError, StageProcess, StageTrainer, StageWorld
from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.pipeline import owner_events, server_events
from protocol.pipeline.exact import StepReports
from protocol.pipeline.ledger import Ledger
from protocol.pipeline.messages import Answer, HeldBlob, Input, Key, Task
from protocol.pipeline.microbatch import OwnerSettings
from protocol.pipeline.owner import Owner
from protocol.pipeline.routing import StagePeer
from tests.protocol.pipeline.virtual.scenario import ACTIVATION, TOKENS, Scenario, blob_of, run_id, stage_settings

FORWARD_SHARE = 0.25  # of the time of a microbatch
OWN_CALL_SECONDS = 1e-4  # of a peer to itself; an answer and an invitation at one moment would repeat without end
MANY_DEADLINES = 5  # in a row, each of which is due again at once


class Peer:
    """The machine of a peer, on which one process follows another."""

    process: "WatchedProcess"

    def __init__(self, name: PeerId, stage: int, speed: float, *, draws: bool) -> None:
        self.name = name
        self.stage = stage
        self.speed = speed
        self.draws = draws
        self.starts = 0  # of processes
        self.is_broken = False  # its results are not finite
        self.first_serial = self.next_serial = 0  # of its process
        self.served = 0

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive

    @property
    def owner(self) -> Owner:
        return self.process.loop.owner


class WatchedProcess(StageProcess):
    """A process whose loop is checked after each event."""

    def __init__(
        self, peer: Peer, loop: StageLoop, trainer: StageTrainer, world: StageWorld, *, has_probes: bool
    ) -> None:
        super().__init__(peer.name, loop, trainer, world)
        self._has_probes = has_probes
        self._overdue = 0

    def post(self, event: StageEvent) -> None:
        super().post(event)
        if self.is_alive and not self._is_handling:
            self._check_memory()
            self._check_deadline(event)

    def _check_memory(self) -> None:
        server = self.loop.server
        if server is not None and server.table.memory.used > server.table.memory.capacity:
            raise InvariantError(f"{self.name} holds {server.table.memory.used} bytes")

    def _check_deadline(self, event: StageEvent) -> None:
        """Check that a deadline passes once, and that nothing is due before it."""
        deadline, now = self.loop.next_deadline(), self._world.clock.now
        is_due = deadline is not None and deadline <= now
        if isinstance(event, DeadlinePassed):
            self._overdue = self._overdue + 1 if is_due else 0
        if self._overdue == MANY_DEADLINES:
            raise InvariantError(f"{self.name} is busy with a deadline that does not pass")
        if self._has_probes and not is_due:
            # Each look at the clock may invite one more owner to the same place.
            actions = self.loop.handle(DeadlinePassed(), now)
            if not all(isinstance(action, server_events.Invite) for action in actions):
                raise InvariantError(f"{self.name} has missed a deadline, and would do {actions}")


class WatchedLocalMode(LocalMode):
    """Notes how microbatches end."""

    def __init__(self, note: Callable[[owner_events.Finished], None]) -> None:
        self._note = note

    def on_finished(self, ended: owner_events.Finished, now: float) -> None:
        super().on_finished(ended, now)
        self._note(ended)


class FaultyTrainer(StageTrainer):
    """Computes at the speed of a peer's machine; a broken one gives no valid results."""

    def __init__(self, peer: Peer, world: "FaultyWorld") -> None:
        self.peer = peer
        self.world = world

    def draw(self, key: Key, window: int | None) -> tuple[Blob, object]:
        self.world.on_draw(self.peer, key)
        return blob_of(key, "tokens", TOKENS), None

    def seconds(self, task: Task) -> float:
        return (FORWARD_SHARE if task.direction == "forward" else 1 - FORWARD_SHARE) / self.peer.speed

    def compute(self, order: server_events.Compute, inputs: Mapping[Input, object]) -> Computation:
        if not self.is_valid(order.task):
            return Computation(valid=False)
        self.count(order)
        task, scenario = order.task, self.world.scenario
        has_result = stage_settings(scenario, self.peer.stage).result_bytes(task.direction)
        result = blob_of(task.key, f"{task.direction} {self.peer.stage}", ACTIVATION) if has_result else None
        return Computation(result, loss=1.0 if self.peer.stage == len(scenario.speeds) - 1 else None)

    def take_step(self, order: server_events.TakeStep, stepped: Callable[[], None]) -> None:
        self.check_step(order)
        self.world.clock.schedule(0.01, partial(self._end_step, stepped))

    def _end_step(self, stepped: Callable[[], None]) -> None:
        process = self.peer.process
        if process.is_alive and process.trainer is self:
            self.step(stepped)

    def is_valid(self, task: Task) -> bool:
        """Return whether the results of a task are finite."""
        return not self.peer.is_broken and task.key not in self.world.poisoned

    def count(self, order: server_events.Compute) -> None:
        """Change the tally by a gradient."""
        raise NotImplementedError

    def check_step(self, order: server_events.TakeStep) -> None:
        """Check the ledger of a step that begins."""

    def step(self, stepped: Callable[[], None]) -> None:
        """End the step."""
        raise NotImplementedError


class TallyTrainer(FaultyTrainer):
    """What the weights of a server really contain; the machines must agree with it."""

    def __init__(self, peer: Peer, world: "FaultyWorld") -> None:
        super().__init__(peer, world)
        self.weights = Counter[Key]()
        self.gradient: list[Key] = []
        self.snapshot: tuple[Counter[Key], Ledger] = Counter(), Ledger()
        self.contributed = Ledger()
        self._steps = 0  # since the last contribution

    def restart(self) -> "TallyTrainer":
        """Return the trainer that comes back from the snapshot."""
        other = TallyTrainer(self.peer, self.world)
        other.weights, other.contributed = Counter(self.snapshot[0]), self.contributed
        other.snapshot = Counter(self.snapshot[0]), self.snapshot[1].copy()
        return other

    def count(self, order: server_events.Compute) -> None:
        if order.adds:
            self.gradient.append(order.task.key)
            self.world.check_added(self.peer, order.task.key)

    def is_valid(self, task: Task) -> bool:
        self.peer.served += 1
        return super().is_valid(task)

    def check_step(self, order: server_events.TakeStep) -> None:
        if Counter(self.gradient) != Counter(order.ledger):
            raise InvariantError(f"the ledger of {self.peer.name} differs from its gradient")

    def step(self, stepped: Callable[[], None]) -> None:
        self.weights.update(self.gradient)
        self.gradient = []
        process = self.peer.process
        stepped()
        server = process.loop.server
        assert server is not None
        self._steps += 1
        if self._steps >= self.world.scenario.steps_per_contribution:
            self._steps = 0
            self.contributed = server.steps.ledger.copy()
            process.post(StageContributed(process.loop.round))
        self.snapshot = Counter(self.weights), server.steps.ledger.copy()

    def drop_sum(self) -> None:
        raise AssertionError("local steps have no sum")


class FaultyWorld(StageWorld):
    """All peers, and the network between them. Seeds with `has_probes` look for deadlines that were missed."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        super().__init__(VirtualClock())
        self.scenario = scenario
        self.runs = [run_id(stage) for stage in range(len(scenario.speeds))]
        self.chance = random.Random(f"swarm {seed}")
        self.has_probes = bool(seed % 2)
        self.peers: dict[PeerId, Peer] = {}
        self.cuts: set[frozenset[PeerId]] = set()
        self.doubts: set[tuple[PeerId, PeerId]] = set()  # a peer, and one that it takes for dead
        self.doubters: set[PeerId] = set()  # all who ever doubted another
        self.poisoned: set[Key] = set()
        self.begun: dict[Key, str] = {}  # how each microbatch ended
        self.dead_additions: set[tuple[int, Key]] = set()
        self.reports: list[str] = []
        self.standing: frozenset[PeerId] | None = None  # those with a share of their own; None: all
        machines = [
            (stage, index, speed) for stage, speeds in enumerate(scenario.speeds) for index, speed in enumerate(speeds)
        ]
        for number, (stage, index, speed) in enumerate(machines, 1):
            draws = self.is_owner(len(machines) - number)
            peer = Peer(f"server-{stage}-{index}", stage, speed, draws=draws)
            self.peers[peer.name] = peer
        for peer in self.peers.values():
            self.start(peer)

    def is_owner(self, index: int) -> bool:
        """Return whether a peer, counted from the last, begins microbatches."""
        return index < self.scenario.owners

    def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Run until a time, or until something has come true."""
        is_over = False

        def end() -> None:
            nonlocal is_over
            is_over = True

        self.clock.schedule(until - self.clock.now, end)
        self.clock.run(lambda: is_over or stop())

    # Peers.

    @property
    def wall_ms(self) -> int:
        return 1 + int(1000 * self.clock.now)

    def start(self, peer: Peer) -> None:
        """Start a process of a peer, with nothing on its disk."""
        peer.starts += 1
        peer.first_serial = peer.next_serial
        self.start_process(peer, self.build_loop(peer), TallyTrainer(peer, self))
        if peer.next_serial >= self.scenario.quota:
            peer.process.post(RestingChanged(True))
        peer.process.post(TrainerReady(0, self.wall_ms))

    def start_process(self, peer: Peer, loop: StageLoop, trainer: FaultyTrainer) -> None:
        """Put a new process in the place of the one that died."""
        peer.process = WatchedProcess(peer, loop, trainer, self, has_probes=self.has_probes)
        self.processes[peer.name] = peer.process

    def build_loop(self, peer: Peer) -> StageLoop:
        """Build the loop of a new process."""
        settings = OwnerSettings(
            peer.name,
            self.scenario.in_flight,
            int(self.scenario.deadline * 1000),
            needs_tokens=self.scenario.owners_send_tokens,
            activation_bytes=ACTIVATION,
        )
        return self.build_stage_loop(peer, settings, WatchedLocalMode(partial(self._note_end, peer.name)))

    def build_stage_loop(self, peer: Peer, settings: OwnerSettings, mode: LocalMode) -> StageLoop:
        """Build a loop with these settings of its owner."""
        owner = Owner(settings, self.runs, random.Random(self.chance.random()))
        return StageLoop(stage_settings(self.scenario, peer.stage), owner, mode, peer.first_serial, draws=peer.draws)

    def on_draw(self, peer: Peer, key: Key) -> None:
        """Note that a microbatch begins; after its quota a peer rests."""
        peer.next_serial = key.serial + 1
        self.begun[key] = "open"
        if peer.next_serial >= self.scenario.quota:
            self.clock.schedule(0.0, partial(peer.process.post, RestingChanged(True)))

    def _note_end(self, name: PeerId, ended: owner_events.Finished) -> None:
        self.begun[Key(name, ended.serial)] = ended.reason or "done"

    def kill(self, peer: Peer) -> None:
        """End the daemon and its trainer; nothing of them is left but the contributions that were sent."""
        if not peer.is_alive:
            return
        trainer = peer.process.trainer
        if isinstance(trainer, TallyTrainer):
            self.dead_additions |= {(peer.stage, key) for key in [*trainer.weights, *trainer.gradient]}
        peer.process.end()
        self.clock.schedule(self.scenario.expiry, self.publish)

    def revive(self, peer: Peer) -> None:
        """Start the next process of a peer whose last one died."""
        if not peer.is_alive:
            self.start(peer)
            self.publish()

    def kill_trainer(self, peer: Peer) -> None:
        """End the trainer; it comes back at once from its snapshot."""
        trainer = peer.process.trainer
        if not peer.is_alive or not isinstance(trainer, TallyTrainer):
            return
        weights, ledger = trainer.snapshot
        lost = (Counter(trainer.gradient) + trainer.weights) - weights
        self.dead_additions |= {(peer.stage, key) for key in lost}
        peer.process.replace_trainer(trainer.restart())
        peer.process.post(TrainerReady(0, self.wall_ms, ledger.copy(), trainer.contributed.copy()))

    # Records.

    def publish(self) -> None:
        """Let everybody hear of the live peers after a while."""
        for peer in self.peers.values():
            self.clock.schedule(self.latency() * 5, partial(self.learn, peer))

    def learn(self, peer: Peer) -> None:
        """Show a peer the others that it takes for live."""
        seen = [each for each in self.peers.values() if self.is_seen(peer.name, each)]
        stages: list[list[StagePeer]] = [[] for _ in self.scenario.speeds]
        for each in seen:
            server, loop = each.process.loop.server, each.process.loop
            if server is not None:
                is_hidden = each.name in self.scenario.hidden
                rate = self.shown_rate(each, server.rate)
                entry = StagePeer(each.name, loop.life, loop.round, rate, server.is_draining, is_hidden)
                stages[each.stage].append(entry)
        for stage, entry in self.announced():
            stages[stage].append(entry)
        serials = {each.name: each.first_serial for each in seen}
        seen_now = PeersSeen(tuple(map(tuple, stages)), serials, self.step_reports(), standing=self.known_standing())
        peer.process.post(seen_now)

    def shown_rate(self, peer: Peer, rate: float) -> float:
        """Return the rate that a peer's record names; `rate` is the one that it has measured."""
        return rate

    def announced(self) -> list[tuple[int, StagePeer]]:
        """Return the keys that announce to serve a stage, and have no process."""
        return []

    def known_standing(self) -> frozenset[PeerId] | None:
        """Return the peers that commits vouch for; None if nothing is known of that."""
        return self.standing

    def step_reports(self) -> StepReports:
        """Return what the peers' records say about exact steps."""
        return StepReports(len(self.scenario.speeds))

    def is_seen(self, name: PeerId, other: Peer) -> bool:
        """Return whether a peer takes another one for live."""
        return other.is_alive and (name, other.name) not in self.doubts

    def doubt(self, name: PeerId, other: PeerId) -> None:
        """Let a peer take a live one for dead, as it does if calls to that one last too long."""
        self.doubts.add((name, other))
        self.doubters.add(name)
        self.publish()

    def trust(self, name: PeerId, other: PeerId) -> None:
        """Let a peer see again that another one lives."""
        self.doubts.discard((name, other))
        self.publish()

    # Links.

    def latency(self) -> float:
        return self.scenario.delay * self.chance.uniform(0.5, 1.5)

    def is_linked(self, one: PeerId, other: PeerId) -> bool:
        return frozenset((one, other)) not in self.cuts

    def is_lost(self, one: PeerId, other: PeerId) -> bool:
        """Return whether a message is lost; those of a peer to itself are not."""
        if one == other:
            return False
        return not self.is_linked(one, other) or self.chance.random() < self.scenario.loss

    def _delay(self, one: PeerId, other: PeerId) -> float:
        return OWN_CALL_SECONDS if one == other else self.latency()

    def ask(self, sender: StageProcess, peer: PeerId, task: Task) -> None:
        name, delay, schedule = sender.name, self._delay(sender.name, peer), self.clock.schedule
        if self.find(peer) is None and self.is_linked(name, peer):
            schedule(self.silent_seconds(peer, delay), partial(sender.post, owner_events.AskFailed(peer, task, True)))
            return
        if name != peer and self.chance.random() < self.scenario.duplication:
            schedule(delay + self.chance.uniform(0, 10), partial(self._repeat, peer, task))
        if self.is_lost(name, peer):
            schedule(5.0, partial(sender.post, owner_events.AskFailed(peer, task, False)))
        else:
            schedule(delay, partial(self._answer, sender, peer, task))

    def _answer(self, sender: StageProcess, peer: PeerId, task: Task) -> None:
        answer = self._judge(peer, task)
        if answer is None or self.is_lost(sender.name, peer):
            self.clock.schedule(5.0, partial(sender.post, owner_events.AskFailed(peer, task, False)))
            return
        answered = owner_events.Answered(peer, task, answer)
        self.clock.schedule(self._delay(sender.name, peer), partial(sender.post, answered))

    def _repeat(self, peer: PeerId, task: Task) -> None:
        self._judge(peer, task)

    def _judge(self, peer: PeerId, task: Task) -> Answer | None:
        process = self.find(peer)
        return process.ask(task) if process is not None else None

    def tell(self, sender: StageProcess, peer: PeerId, event: StageEvent, failed: StageEvent | None = None) -> None:
        if not self.is_lost(sender.name, peer):
            self.clock.schedule(self._delay(sender.name, peer), partial(self._post, peer, event))
        elif failed is not None:
            self.clock.schedule(5.0, partial(sender.post, failed))

    def probe(self, sender: StageProcess, peer: PeerId, stage: int) -> None:
        name, delay = sender.name, self._delay(sender.name, peer)
        if self.find(peer) is None and self.is_linked(name, peer):
            answers, seconds = False, self.silent_seconds(peer, delay)
        else:
            answers = not self.is_lost(name, peer) and not self.is_lost(peer, name)
            seconds = 2 * delay if answers else 5.0
        self.clock.schedule(seconds, partial(sender.post, owner_events.Probed(peer, stage, answers)))

    def silent_seconds(self, peer: PeerId, delay: float) -> float:
        """Return how long a call to a peer without a process lasts; the host of a dead one says so at once."""
        return delay

    def _post(self, peer: PeerId, event: StageEvent) -> None:
        process = self.find(peer)
        if process is not None:
            process.post(event)

    def fetch(self, receiver: StageProcess, held: HeldBlob, arrive: Callable[[StageProcess | None], None]) -> None:
        holder = held.holder
        is_cut_off = held.blob.size >= ACTIVATION and {receiver.name, holder} <= self.scenario.hidden
        seconds = 60.0 if is_cut_off else 2 * self.latency() + held.blob.size / self.scenario.bandwidth

        def end() -> None:
            is_here = not is_cut_off and not self.is_lost(receiver.name, holder)
            arrive(self.find(holder) if is_here else None)

        self.clock.schedule(seconds, end)

    # Checks.

    def on_compute(self, process: StageProcess, seconds: float) -> None:
        """Note nothing: peers count what they have served when it has ended."""

    def on_report(self, process: StageProcess, action: StageAction) -> None:
        if isinstance(action, owner_events.StageEmpty):
            self.reports.append(f"stage {action.stage} is empty")

    def copies(self, stage: int, key: Key) -> int:
        """Return how often the live servers of a stage contain a microbatch."""
        trainers = [peer.process.trainer for peer in self.peers.values() if peer.stage == stage and peer.is_alive]
        tallies = [trainer for trainer in trainers if isinstance(trainer, TallyTrainer)]
        return sum(trainer.weights[key] + trainer.gradient.count(key) for trainer in tallies)

    def check_added(self, peer: Peer, key: Key) -> None:
        """Check that no live server of the stage contains a microbatch twice, and no two contain it.

        An owner that took a live server for dead has the work done again.
        """
        if key.owner not in self.doubters and self.copies(peer.stage, key) > 1:
            raise InvariantError(f"stage {peer.stage} counts {key} twice")

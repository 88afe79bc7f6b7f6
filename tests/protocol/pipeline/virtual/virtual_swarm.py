"""Peers of a pipeline in virtual time: delays, losses, deaths, restarts, slow and broken machines."""

import random
from collections import Counter
from collections.abc import Iterable

from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.pipeline import owner_events, server_events
from protocol.pipeline.ledger import Ledger
from protocol.pipeline.messages import Answer, Direction, HeldBlob, Input, Key, Task
from protocol.pipeline.microbatch import OwnerSettings
from protocol.pipeline.owner import Owner
from protocol.pipeline.routing import StagePeer
from protocol.pipeline.server import StageServer
from protocol.pipeline.steps import LocalSteps
from tests.protocol.pipeline.virtual.clock import Clock
from tests.protocol.pipeline.virtual.scenario import (
    ACTIVATION,
    TOKENS,
    InvariantError,
    Peer,
    Scenario,
    Trainer,
    blob_of,
    run_id,
    stage_settings,
)

FORWARD_SHARE = 0.25  # of the time of a microbatch


class VirtualSwarm(Clock):
    """All peers and the network between them."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        super().__init__()
        self.scenario = scenario
        self.chance = random.Random(f"swarm {seed}")
        self.peers: dict[PeerId, Peer] = {}
        self.cuts: set[frozenset[PeerId]] = set()
        self.doubts: set[tuple[PeerId, PeerId]] = set()  # a peer, and one that it takes for dead
        self.doubters: set[PeerId] = set()  # so far
        self.poisoned: set[Key] = set()
        self.begun: dict[Key, str] = {}  # how each microbatch ended
        self.dead_additions: set[tuple[int, Key]] = set()
        self.reports: list[str] = []
        self._names: dict[bytes, Input] = {}
        self._build()

    # Network

    def latency(self) -> float:
        return self.scenario.delay * self.chance.uniform(0.5, 1.5)

    def is_linked(self, one: PeerId, other: PeerId) -> bool:
        return frozenset((one, other)) not in self.cuts

    def is_lost(self, one: PeerId, other: PeerId) -> bool:
        return not self.is_linked(one, other) or self.chance.random() < self.scenario.loss

    # Peers

    def _build(self) -> None:
        for stage, speeds in enumerate(self.scenario.speeds):
            for index, speed in enumerate(speeds):
                self._add(Peer(f"server-{stage}-{index}", stage, speed))
        for index in range(self.scenario.owners):
            self._add(Peer(f"owner-{index}", None, 0.0))
        self.publish()

    def _add(self, peer: Peer) -> None:
        self.peers[peer.name] = peer
        self.start(peer)

    def start(self, peer: Peer) -> None:
        peer.timer = None
        if peer.stage is None:
            settings = OwnerSettings(
                peer.name,
                self.scenario.in_flight,
                int(self.scenario.deadline * 1000),
                needs_tokens=self.scenario.owners_send_tokens,
            )
            runs = [run_id(stage) for stage in range(len(self.scenario.speeds))]
            peer.owner = Owner(settings, runs, random.Random(self.chance.random()))
        else:
            peer.server = StageServer(LocalSteps(stage_settings(self.scenario, peer.stage), Ledger()), peer.life, 0)
        self.schedule(0.0, lambda: self.fill(peer))

    def kill(self, peer: Peer) -> None:
        """End the daemon and its trainer; nothing of them is left but the contributions that were sent."""
        if not peer.is_alive:
            return
        peer.is_alive = False
        peer.blobs = {}
        if peer.server is not None and peer.stage is not None:
            self.dead_additions |= {(peer.stage, key) for key in peer.trainer.weights}
            self.dead_additions |= {(peer.stage, key) for key in peer.trainer.gradient}
        peer.trainer = Trainer(generation=peer.trainer.generation + 1)
        peer.owner = peer.server = None
        self.schedule(self.scenario.expiry, self.publish)

    def revive(self, peer: Peer) -> None:
        if peer.is_alive:
            return
        peer.is_alive, peer.life = True, peer.life + 1
        peer.first_serial = peer.next_serial
        peer.steps_since_contribution = 0
        self.start(peer)
        self.publish()

    def kill_trainer(self, peer: Peer) -> None:
        """End the trainer; it comes back at once from its snapshot."""
        if not peer.is_alive or peer.server is None or peer.stage is None:
            return
        weights, ledger = peer.trainer.snapshot
        lost = (Counter(peer.trainer.gradient) + peer.trainer.weights) - weights
        self.dead_additions |= {(peer.stage, key) for key in lost}
        snapshot = (Counter(weights), ledger.copy())
        peer.trainer = Trainer(Counter(weights), [], snapshot, peer.trainer.generation + 1)
        peer.life += 1
        self.serve(peer, server_events.TrainerRestarted(peer.life, ledger.copy()))
        self.publish()

    def publish(self) -> None:
        """Let everybody hear of the live peers after a while."""
        for peer in self.peers.values():
            if peer.is_alive:
                self.schedule(self.latency() * 5, lambda peer=peer: self._learn(peer))  # type: ignore[misc]

    def _learn(self, peer: Peer) -> None:
        if not peer.is_alive:
            return
        if peer.owner is not None:
            self.own(peer, owner_events.PeersChanged(self.listing(peer.name), 0))
        if peer.server is not None:
            owners = [each for each in self.peers.values() if each.stage is None and self.is_seen(peer.name, each)]
            self.serve(peer, server_events.OwnersChanged({each.name: each.first_serial for each in owners}))

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

    def listing(self, name: PeerId) -> tuple[tuple[StagePeer, ...], ...]:
        """Return the servers of each stage, as a peer sees them."""
        stages: list[list[StagePeer]] = [[] for _ in self.scenario.speeds]
        for peer in self.peers.values():
            if self.is_seen(name, peer) and peer.server is not None and peer.stage is not None:
                rate = peer.server.rate
                is_hidden = peer.name in self.scenario.hidden
                stages[peer.stage].append(StagePeer(peer.name, peer.life, 0, rate, peer.server.is_draining, is_hidden))
        return tuple(tuple(entries) for entries in stages)

    # Owners

    def own(self, peer: Peer, event: owner_events.Event | None) -> None:
        """Give the owner an event, or let it act on the time."""
        if peer.owner is not None:
            owner, now = peer.owner, self.now
            self._carry_out(peer, owner.advance(now) if event is None else owner.handle(event, now))
            self.fill(peer)

    def fill(self, peer: Peer) -> None:
        owner = peer.owner
        while owner is not None and owner.room > 0 and peer.next_serial < self.scenario.quota:
            key = Key(peer.name, peer.next_serial)
            peer.next_serial += 1
            self.begun[key] = "open"
            tokens = blob_of(key, "tokens", TOKENS)
            self._names[tokens.digest] = "tokens"
            peer.blobs[key] = {tokens}
            self._carry_out(peer, owner.begin(key.serial, HeldBlob(tokens, peer.name), self.now))
        self._set_timer(peer, owner)

    def _carry_out(self, peer: Peer, actions: Iterable[owner_events.Action]) -> None:
        for action in actions:
            match action:
                case owner_events.Ask():
                    self._ask(peer, action)
                case owner_events.Release():
                    self._release(peer, action)
                case owner_events.Finished():
                    key = Key(peer.name, action.serial)
                    self.begun[key] = action.reason or "done"
                    peer.blobs.pop(key, None)
                case owner_events.StageEmpty():
                    self.reports.append(f"stage {action.stage} is empty")

    def _ask(self, peer: Peer, action: owner_events.Ask) -> None:
        server, owner, task = self.peers[action.peer], peer.owner, action.task
        delay = self.latency()
        if not server.is_alive and self.is_linked(peer.name, server.name):
            self.schedule(delay, lambda: self._reply(peer, owner, owner_events.AskFailed(server.name, task, True)))
            return
        if self.chance.random() < self.scenario.duplication:
            self.schedule(delay + self.chance.uniform(0, 10), lambda: self._judge(server, task))
        if self.is_lost(peer.name, server.name):
            self.schedule(5.0, lambda: self._reply(peer, owner, owner_events.AskFailed(server.name, task, False)))
        else:
            self.schedule(delay, lambda: self._answer(peer, owner, server, task))

    def _answer(self, peer: Peer, owner: Owner | None, server: Peer, task: Task) -> None:
        answer = self._judge(server, task)
        if answer is None or self.is_lost(peer.name, server.name):
            failed = owner_events.AskFailed(server.name, task, False)
            self.schedule(5.0, lambda: self._reply(peer, owner, failed))
            return
        answered = owner_events.Answered(server.name, task, answer)
        self.schedule(self.latency(), lambda: self._reply(peer, owner, answered))

    def _judge(self, server: Peer, task: Task) -> Answer | None:
        if server.server is None:
            return None
        answer, actions = server.server.ask(task, self.now)
        self._work(server, actions)
        return answer

    def _reply(self, peer: Peer, owner: Owner | None, event: owner_events.Event) -> None:
        if peer.owner is owner:
            self.own(peer, event)

    def _release(self, peer: Peer, action: owner_events.Release) -> None:
        server, owner = self.peers[action.peer], peer.owner
        if self.is_lost(peer.name, server.name):
            failed = owner_events.ReleaseFailed(action.peer, action.stage, action.serials)
            self.schedule(5.0, lambda: self._reply(peer, owner, failed))
            return
        event = server_events.ReleasedBy(peer.name, tuple(sorted(action.serials)))
        self.schedule(self.latency(), lambda: self.serve(server, event))

    def _invite(self, server: Peer, action: server_events.Invite) -> None:
        owner = self.peers[action.owner]
        if not self.is_lost(server.name, owner.name) and server.stage is not None:
            event = owner_events.Invited(server.name, run_id(server.stage))
            self.schedule(self.latency(), lambda: self.own(owner, event))

    # Servers

    def serve(self, peer: Peer, event: server_events.Event | None) -> None:
        """Give the server an event, or let it act on the time."""
        if peer.server is not None:
            server, now = peer.server, self.now
            self._work(peer, server.advance(now) if event is None else server.handle(event, now))

    def _work(self, peer: Peer, actions: Iterable[server_events.Action]) -> None:
        for action in actions:
            match action:
                case server_events.FetchInputs():
                    self._fetch(peer, action)
                case server_events.Compute():
                    self._compute(peer, action)
                case server_events.TakeStep():
                    self._step(peer, action)
                case server_events.SendOutcome():
                    self._tell(peer, action)
                case server_events.Invite():
                    self._invite(peer, action)
                case server_events.Drop():
                    peer.blobs[action.key] = peer.blobs.get(action.key, set()) & action.kept
                    if not peer.blobs[action.key]:
                        del peer.blobs[action.key]
        server = peer.server
        if server is not None and server.table.memory.used > server.table.memory.capacity:
            raise InvariantError(f"{peer.name} holds {server.table.memory.used} bytes")
        self._set_timer(peer, server)

    def _set_timer(self, peer: Peer, machine: Owner | StageServer | None) -> None:
        time = machine.next_deadline() if machine is not None else None
        if time is None or (peer.timer is not None and self.now < peer.timer <= time):
            return
        peer.timer = time = max(time, self.now + 0.001)
        self.schedule_at(time, lambda: self._tick(peer, machine))

    def _tick(self, peer: Peer, machine: Owner | StageServer | None) -> None:
        if machine is None or machine not in (peer.owner, peer.server):
            return
        if peer.timer is not None and peer.timer <= self.now:
            peer.timer = None
        if peer.owner is not None:
            self.own(peer, None)
        else:
            self.serve(peer, None)

    def _fetch(self, peer: Peer, action: server_events.FetchInputs) -> None:
        server = peer.server
        size = sum(held.blob.size for _, held in action.inputs)
        cut_off = [held for _, held in action.inputs if self._is_cut_off(peer.name, held)]
        delay = 60.0 if cut_off else 2 * self.latency() + size / self.scenario.bandwidth

        def arrive() -> None:
            if peer.server is not server:
                return
            for _, held in action.inputs:
                source = self.peers[held.holder]
                is_there = held not in cut_off and held.blob in source.blobs.get(action.key, set())
                if not is_there or self.is_lost(peer.name, source.name):
                    missing = self._name_of(held)
                    self.serve(peer, server_events.InputMissing(action.key, action.direction, action.token, missing))
                    return
            peer.blobs.setdefault(action.key, set()).update(held.blob for _, held in action.inputs)
            self.serve(peer, server_events.InputsFetched(action.key, action.direction, action.token))

        self.schedule(delay, arrive)

    def _is_cut_off(self, name: PeerId, held: HeldBlob) -> bool:
        """Return whether only small messages pass between a peer and the holder of an activation."""
        return held.blob.size >= ACTIVATION and {name, held.holder} <= self.scenario.hidden and name != held.holder

    def _name_of(self, held: HeldBlob) -> Input:
        return self._names[held.blob.digest]

    def _compute(self, peer: Peer, action: server_events.Compute) -> None:
        trainer, task, server = peer.trainer, action.task, peer.server
        share = FORWARD_SHARE if task.direction == "forward" else 1 - FORWARD_SHARE
        seconds = share / peer.speed
        self.check_inputs(peer, task)

        def end() -> None:
            if peer.server is not server or peer.trainer is not trainer:
                return
            self.check_inputs(peer, task)
            valid = not peer.is_broken and task.key not in self.poisoned
            if action.adds and valid:
                trainer.gradient.append(task.key)
                self.check_added(peer, task.key)
            peer.served += 1
            result = self._result(peer, task.key, task.direction) if valid else None
            if result is not None:
                peer.blobs.setdefault(task.key, set()).add(result)
            loss = 1.0 if valid and peer.stage == len(self.scenario.speeds) - 1 else None
            self.serve(
                peer,
                server_events.Computed(
                    task.key, task.direction, action.token, valid, result, loss, 1000 * share / peer.speed
                ),
            )

        self.schedule(seconds, end)

    def check_inputs(self, peer: Peer, task: Task) -> None:
        """Check that nothing else is written where a trainer reads, from the beginning to the end of a task."""
        needed = {each.blob for each in task.inputs.named().values()}
        if not needed <= peer.blobs.get(task.key, set()):
            raise InvariantError(f"{peer.name} computes {task.key} without its inputs")

    def _result(self, peer: Peer, key: Key, direction: Direction) -> Blob | None:
        assert peer.stage is not None
        if not stage_settings(self.scenario, peer.stage).result_bytes(direction):
            return None
        blob = blob_of(key, f"{direction} {peer.stage}", ACTIVATION)
        self._names[blob.digest] = "activation" if direction == "forward" else "gradient"
        return blob

    def copies(self, stage: int, key: Key) -> int:
        """Return how often the live servers of a stage contain a microbatch."""
        trainers = [peer.trainer for peer in self.peers.values() if peer.stage == stage and peer.is_alive]
        return sum(trainer.weights[key] + trainer.gradient.count(key) for trainer in trainers)

    def check_added(self, peer: Peer, key: Key) -> None:
        """Check that no live server of the stage contains a microbatch twice, and no two contain it.

        An owner that took a live server for dead has the work done again.
        """
        if peer.stage is not None and key.owner not in self.doubters and self.copies(peer.stage, key) > 1:
            raise InvariantError(f"stage {peer.stage} counts {key} twice")

    def _step(self, peer: Peer, action: server_events.TakeStep) -> None:
        trainer, server = peer.trainer, peer.server
        if Counter(trainer.gradient) != Counter(action.ledger):
            raise InvariantError(f"the ledger of {peer.name} differs from its gradient")

        def end() -> None:
            if peer.server is not server or peer.trainer is not trainer or server is None:
                return
            trainer.weights.update(trainer.gradient)
            trainer.gradient = []
            self.serve(peer, server_events.Stepped())
            peer.steps_since_contribution += 1
            if peer.steps_since_contribution >= self.scenario.steps_per_contribution:
                peer.steps_since_contribution = 0
                peer.contributed.append(server.steps.take_ledger())
            trainer.snapshot = Counter(trainer.weights), server.steps.ledger.copy()

        self.schedule(0.01, end)

    def _tell(self, peer: Peer, action: server_events.SendOutcome) -> None:
        receiver = self.peers[action.owner]
        if not self.is_lost(peer.name, receiver.name):
            owner = receiver.owner
            told = owner_events.OutcomeReceived(peer.name, action.outcome)
            self.schedule(self.latency(), lambda: self._reply(receiver, owner, told))

"""Strangers in a virtual pipeline whose honest peers work without faults, and the old rules that let them succeed."""

import pytest

from node.loop.stage_events import Draining
from node.simulation.virtual.stage import StageProcess
from protocol.identity import PeerId
from protocol.pipeline import microbatch_table, owner, routing
from protocol.pipeline.messages import MAX_DEADLINE_MS, Answer, HeldBlob, Inputs, Key, Task
from protocol.pipeline.routing import Router
from protocol.pipeline.server import StageServer
from tests.protocol.pipeline.virtual.faulty_world import FaultyWorld, Peer, TallyTrainer, WatchedProcess
from tests.protocol.pipeline.virtual.scenario import ACTIVATION, TOKENS, Scenario, blob_of

ENDLESS = 10**6
ATTACK_BEGINS = 20.0
CALL_SECONDS = 0.2  # between two tasks of a stranger at each server
LIE = 1e6  # microbatches a second


class AttackedWorld(FaultyWorld):
    """Two honest peers of each stage, all of them owners, and strangers that join as the last peers of the last stage.

    Strangers compute nothing for others, except those of a subclass that sets `serves`.
    """

    serves = False

    def __init__(self, liars: int = 1, *, owners: int = 4, step_size: int = 8, is_attacked: bool = True) -> None:
        speeds = ((4.0,) * 2, (4.0,) * 2 + (4.0,) * liars)
        scenario = Scenario(
            speeds, quota=ENDLESS, owners=owners + liars, step_size=step_size, memory=10**7, deadline=600.0, in_flight=8
        )
        self.liars = frozenset(f"server-1-{2 + number}" for number in range(liars))
        self.is_attacked = is_attacked
        self.serial = 0
        super().__init__(scenario, 2)
        self.standing = frozenset(self.peers) - self.liars

    def is_owner(self, index: int) -> bool:
        return index >= len(self.liars) and super().is_owner(index)

    def measure(self, seconds: float) -> float:
        """Return how many microbatches of honest owners end in a second once the attack has begun."""
        self.attack()
        self.run(ATTACK_BEGINS)
        before = self.done
        self.run(ATTACK_BEGINS + seconds)
        return (self.done - before) / seconds

    @property
    def done(self) -> int:
        return sum(peer.owner.counts.done for peer in self.peers.values())

    @property
    def invented(self) -> int:
        """Return how many gradients of strangers honest servers have in their weights and open steps."""
        trainers = [peer.process.trainer for peer in self.honest_servers]
        tallies = [trainer for trainer in trainers if isinstance(trainer, TallyTrainer)]
        return sum(key.owner in self.liars for each in tallies for key in [*each.weights.elements(), *each.gradient])

    @property
    def honest_servers(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.name not in self.liars]

    def served(self, name: str) -> int:
        """Return a count of all honest servers."""
        servers = [peer.process.loop.server for peer in self.honest_servers]
        return sum(getattr(each.counts, name) for each in servers if each is not None)

    def attack(self) -> None:
        """Begin the attack, if there is one."""
        if not self.serves or not self.is_attacked:
            for liar in self.liars:
                self.peers[liar].process.post(Draining())
            self.publish()
        if self.is_attacked:
            self.clock.schedule(ATTACK_BEGINS, self._strike)

    def _strike(self) -> None:
        for liar in sorted(self.liars):
            self.strike(self.peers[liar].process)
        self.clock.schedule(CALL_SECONDS, self._strike)

    def strike(self, liar: StageProcess) -> None:
        """Do what a stranger does again and again."""

    def ask_as(self, liar: StageProcess, server: Peer, task: Task) -> Answer | None:
        """Let a server answer a task of a stranger."""
        answer = server.process.ask(task)
        return answer

    def task_for(self, liar: PeerId, server: Peer, serial: int, inputs: Inputs, **changes: object) -> Task:
        values = {"direction": "forward", "deadline_ms": MAX_DEADLINE_MS, "replay": False, **changes}
        return Task(self.runs[server.stage], liar, serial, attempt=1, life=0, round=0, inputs=inputs, **values)  # type: ignore[arg-type]

    def tokens_of(self, liar: StageProcess, serial: int) -> HeldBlob:
        """Return tokens that a stranger serves."""
        key = Key(liar.name, serial)
        blob = blob_of(key, "tokens", TOKENS)
        liar.held.setdefault(key, {})[blob] = None
        return HeldBlob(blob, liar.name)

    def activation_of(self, liar: StageProcess, serial: int, what: str = "activation") -> HeldBlob:
        """Return an activation that a stranger serves."""
        key = Key(liar.name, serial)
        blob = blob_of(key, what, ACTIVATION)
        liar.held.setdefault(key, {})[blob] = None
        return HeldBlob(blob, liar.name)

    def forward_inputs(self, liar: StageProcess, server: Peer, serial: int) -> Inputs:
        tokens = self.tokens_of(liar, serial)
        return Inputs(None if server.stage == 0 else self.activation_of(liar, serial), tokens)


class Withholders(AttackedWorld):
    """Their forwards take places at all servers, and their backwards never come."""

    def strike(self, liar: StageProcess) -> None:
        for server in self.honest_servers:
            self.serial += 1
            self.ask_as(
                liar,
                server,
                self.task_for(liar.name, server, self.serial, self.forward_inputs(liar, server, self.serial)),
            )


class Inventors(AttackedWorld):
    """They send gradients without any forward, and a life goes on."""

    def strike(self, liar: StageProcess) -> None:
        for server in self.honest_servers:
            self.serial += 1
            inputs = self.forward_inputs(liar, server, self.serial)
            if server.stage == 0:
                inputs = Inputs(None, inputs.tokens, self.activation_of(liar, self.serial, "gradient"))
            self.ask_as(liar, server, self.task_for(liar.name, server, self.serial, inputs, direction="backward"))


class BlackHole(WatchedProcess):
    """A server that accepts every task, reports a great rate, and never an outcome."""

    def ask(self, task: Task) -> Answer | None:
        loop = self.loop
        if task.owner == self.name:
            return super().ask(task)
        return Answer("accepted", loop.life, loop.round, LIE)


class BlackHoles(AttackedWorld):
    """They serve the last stage as the third peers of it."""

    serves = True

    def start_process(self, peer: Peer, loop, trainer) -> None:  # type: ignore[no-untyped-def]
        if peer.name in self.liars and self.is_attacked:
            peer.process = BlackHole(peer, loop, trainer, self, has_probes=False)
            self.processes[peer.name] = peer.process
        else:
            super().start_process(peer, loop, trainer)

    def shown_rate(self, peer: Peer, rate: float) -> float:
        return LIE if peer.name in self.liars and self.is_attacked else rate


def waits_as_long_as_owners_ask(patch: pytest.MonkeyPatch) -> None:
    """The old rule of deadlines."""
    patch.setattr(StageServer, "_leave_behind", lambda self, now: None)
    patch.setattr(microbatch_table.Entry, "waits_for_owner_until", float("inf"))
    patch.setattr(microbatch_table, "MIN_KEPT_SECONDS", float("inf"))


def believes_rates_and_waits_for_outcomes(patch: pytest.MonkeyPatch) -> None:
    """The old rule of routing."""
    patch.setattr(routing, "FIRST_TASKS", 10**9)
    patch.setattr(Router, "record_outcome", lambda self, peer, seconds, tasks: None)
    patch.setattr(Router, "record_loss", lambda self, peer, now: None)
    patch.setattr(owner, "OVERDUE_PATIENCES", float("inf"))
    patch.setattr(owner, "UNPROVEN_PATIENCES", float("inf"))


def trusts_gradients_without_forwards(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StageServer, "_may_add", lambda self, task: True)

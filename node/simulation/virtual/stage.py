"""Peers of a pipeline in virtual time: the product's stage loops, with virtual links, memory and trainers.

`StageWorld` has the peers and the links between them, `StageProcess` carries out the actions of one peer's loop, and
`StageTrainer` computes. The simulator gives them fair links and real gradients; the seeds of the tests give them faulty
links and trainers that keep a tally.
"""

import hashlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from node.loop.stage_events import (
    AnswerTask,
    DeadlinePassed,
    DrawTokens,
    DropTokens,
    PublishLife,
    StageAction,
    StageEvent,
    StatementReceived,
    TaskAsked,
    TokensDrawn,
)
from node.loop.stage_loop import StageLoop
from node.simulation.virtual.network import VirtualClock
from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed
from protocol.pipeline import owner_events, server_events
from protocol.pipeline.exact import SendStatement
from protocol.pipeline.messages import Answer, HeldBlob, Input, Key, Task, question_of
from protocol.pipeline.results import ResultValue, SignedResult, StageResult

OWN = ""  # owner in the keys of a peer's own tokens, so that they differ from those that it serves
MIN_PAUSE_SECONDS = 0.001  # until a deadline that has passed already


@dataclass(frozen=True)
class Computation:
    """The result of a task: no blob where the stage has none, and no valid result of wrong inputs."""

    blob: Blob | None = None
    content: object = None
    loss: float | None = None
    valid: bool = True


class StageTrainer(ABC):
    """Computes for one process of a peer. The contents of blobs are objects that only trainers understand."""

    @abstractmethod
    def draw(self, key: Key, window: int | None) -> tuple[Blob, object]:
        """Return the tokens of the peer's next microbatch, or of the one at `window` of the run's text."""

    @abstractmethod
    def seconds(self, task: Task) -> float:
        """Return how long a task takes."""

    @abstractmethod
    def compute(self, order: server_events.Compute, inputs: Mapping[Input, object]) -> Computation:
        """Compute a task whose time has passed."""

    @abstractmethod
    def take_step(self, order: server_events.TakeStep, stepped: Callable[[], None]) -> None:
        """Make an inner step, now or as soon as the round allows, and call `stepped` when gradients may come again."""

    @abstractmethod
    def drop_sum(self) -> None:
        """Begin the sum of the exact step again."""


class StageProcess:
    """One process of a peer: its loop, its memory and its trainer. Nothing of it outlives the process."""

    def __init__(self, name: PeerId, loop: StageLoop, trainer: StageTrainer, world: "StageWorld") -> None:
        self.name = name
        self.loop = loop
        self.trainer = trainer
        self.is_alive = True
        self.held: dict[Key, dict[Blob, object]] = {}  # contents of blobs by microbatch
        self._world = world
        self._events = deque[StageEvent]()
        self._is_handling = False
        self._answer: Answer | None = None
        self._timer: float | None = None

    def post(self, event: StageEvent) -> None:
        """Let the loop handle an event, after those that it handles already."""
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        while self._events and self.is_alive:
            for action in self.loop.handle(self._events.popleft(), self._world.clock.now):
                self._run(action)
        self._is_handling = False
        self._set_timer()

    def ask(self, task: Task) -> Answer | None:
        """Answer a task; None if this process is dead."""
        self._answer = None
        self.post(TaskAsked(task))
        return self._answer

    def end(self) -> None:
        """Kill the process."""
        self.is_alive = False
        self.held.clear()
        self._events.clear()

    def replace_trainer(self, trainer: StageTrainer) -> None:
        """Start another trainer in place of one that died; what that one computes does not arrive any more."""
        self.trainer = trainer

    def find(self, key: Key, blob: Blob) -> dict[Blob, object] | None:
        """Return the blobs of a microbatch among which one is; None if it is not here."""
        places = [key, Key(OWN, key.serial)] if key.owner == self.name else [key]
        return next((self.held[place] for place in places if blob in self.held.get(place, {})), None)

    # Actions.

    def _run(self, action: StageAction) -> None:
        match action:
            case server_events.FetchInputs():
                self._fetch(action, iter(action.inputs))
            case server_events.Compute():
                self._compute(action)
            case server_events.TakeStep():
                self.trainer.take_step(action, self._if_same(partial(self.post, server_events.Stepped())))
            case server_events.DropSum():
                self.trainer.drop_sum()
            case server_events.Drop(key, kept):
                held = {blob: content for blob, content in self.held.get(key, {}).items() if blob in kept}
                self.held[key] = held
                if not held:
                    del self.held[key]
            case DropTokens(serial):
                self.held.pop(Key(OWN, serial), None)
            case DrawTokens(serial, window):
                self._world.clock.schedule(0.0, self._if_same(partial(self._draw, serial, window)))
            case AnswerTask(answer):
                self._answer = answer
            case PublishLife():
                self._world.publish()
            case _:
                self._send(action)

    def _send(self, action: StageAction) -> None:
        world = self._world
        match action:
            case owner_events.Ask(peer, task):
                world.ask(self, peer, task)
            case owner_events.Release(peer, stage, serials):
                ended = server_events.ReleasedBy(self.name, tuple(sorted(serials)))
                world.tell(self, peer, ended, owner_events.ReleaseFailed(peer, stage, serials))
            case owner_events.Probe(peer, stage):
                world.probe(self, peer, stage)
            case server_events.SendOutcome(owner, outcome):
                world.tell(self, owner, owner_events.OutcomeReceived(self.name, outcome))
            case server_events.Invite(owner):
                world.tell(self, owner, owner_events.Invited(self.name, self.loop.settings.run))
            case SendStatement(peers, statement):
                for peer in sorted(peers):
                    world.tell(self, peer, StatementReceived(self.name, statement))
            case _:
                world.on_report(self, action)

    def _draw(self, serial: int, window: int | None) -> None:
        blob, content = self.trainer.draw(Key(self.name, serial), window)
        self.held[Key(OWN, serial)] = {blob: content}
        self.post(TokensDrawn(serial, blob))

    def _fetch(self, order: server_events.FetchInputs, left: Iterator[tuple[Input, HeldBlob]]) -> None:
        """Get the next input of a task, and the others after it, as a daemon does."""
        wanted = next(left, None)
        if wanted is None:
            self.post(server_events.InputsFetched(order.key, order.direction, order.token))
            return
        name, held = wanted

        def arrive(source: "StageProcess | None") -> None:
            found = source.find(order.key, held.blob) if source is not None and source.is_alive else None
            if not self.is_alive:
                return
            if found is None:
                self.post(server_events.InputMissing(order.key, order.direction, order.token, name))
                return
            self.held.setdefault(order.key, {})[held.blob] = found[held.blob]
            self._fetch(order, left)

        if held.holder == self.name:
            self._world.clock.schedule(0.0, partial(arrive, self))
        else:
            self._world.fetch(self, held, arrive)

    def _compute(self, order: server_events.Compute) -> None:
        task, seconds = order.task, self.trainer.seconds(order.task)
        inputs = self._inputs(task)

        def end() -> None:
            self._inputs(task)  # nothing else was written where the trainer reads
            result = self.trainer.compute(order, inputs)
            if result.blob is not None:
                self.held.setdefault(task.key, {})[result.blob] = result.content
            signed = self._sign(task, result) if result.valid else None
            computed = server_events.Computed(
                task.key,
                task.direction,
                order.token,
                result.valid,
                result.blob,
                result.loss,
                1000 * seconds,
                signed=signed,
            )
            self.post(computed)

        self._world.on_compute(self, seconds)
        self._world.clock.schedule(seconds, self._if_same(end))

    def _sign(self, task: Task, result: Computation) -> SignedResult:
        """Name a result as one of this peer; nobody forges signatures here."""
        question = question_of(task, hashlib.sha256(b"%d" % task.round).digest(), "virtual")
        value = ResultValue(result.blob, result.loss)
        return SignedResult(Signed(peer=self.name), StageResult(question, value), self.name)

    def _inputs(self, task: Task) -> dict[Input, object]:
        held = self.held.get(task.key, {})
        missing = [name for name, each in task.inputs.named().items() if each.blob not in held]
        if missing:
            raise InvariantError(f"{self.name} computes {task.key} without its inputs {missing}")
        return {name: held[each.blob] for name, each in task.inputs.named().items()}

    def _if_same(self, act: Callable[[], None]) -> Callable[[], None]:
        """Return an action that a trainer does unless it has died meanwhile, or the daemon has."""
        trainer = self.trainer

        def do() -> None:
            if self.is_alive and self.trainer is trainer:
                act()

        return do

    def _set_timer(self) -> None:
        deadline = self.loop.next_deadline()
        now = self._world.clock.now
        if not self.is_alive or deadline is None or (self._timer is not None and now < self._timer <= deadline):
            return
        self._timer = time = max(deadline, now + MIN_PAUSE_SECONDS)
        self._world.clock.schedule(time - now, partial(self._on_timer, time))

    def _on_timer(self, time: float) -> None:
        if self.is_alive and time == self._timer:
            self._timer = None
            self.post(DeadlinePassed())


class InvariantError(AssertionError):
    """A rule of the protocol is broken."""


class StageWorld(ABC):
    """All peers of a pipeline by name, and the links between them."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.processes: dict[PeerId, StageProcess] = {}  # the newest of each peer

    def find(self, peer: PeerId) -> StageProcess | None:
        """Return the process of a peer if it lives."""
        process = self.processes.get(peer)
        return process if process is not None and process.is_alive else None

    @abstractmethod
    def ask(self, sender: StageProcess, peer: PeerId, task: Task) -> None:
        """Ask a peer for a computation, and post Answered or AskFailed to the sender."""

    @abstractmethod
    def tell(self, sender: StageProcess, peer: PeerId, event: StageEvent, failed: StageEvent | None = None) -> None:
        """Post an event to a peer after a while; if it is lost, post `failed` to the sender."""

    @abstractmethod
    def probe(self, sender: StageProcess, peer: PeerId, stage: int) -> None:
        """Post Probed to the sender: whether a peer answers a small call."""

    @abstractmethod
    def fetch(self, receiver: StageProcess, held: HeldBlob, arrive: Callable[[StageProcess | None], None]) -> None:
        """Call `arrive` with the holder of a blob once its bytes are here; with None if they cannot come."""

    @abstractmethod
    def publish(self) -> None:
        """Let all peers see the present peers after a while, by PeersSeen."""

    @abstractmethod
    def on_compute(self, process: StageProcess, seconds: float) -> None:
        """Note that a trainer begins a task that takes `seconds`."""

    @abstractmethod
    def on_report(self, process: StageProcess, action: StageAction) -> None:
        """Note an action that only reports something."""

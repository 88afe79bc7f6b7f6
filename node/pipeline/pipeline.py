"""One peer of a pipeline: it serves its stage, and sends microbatches of its own text through all stages.

The decisions are made by two machines, `protocol.pipeline.server` and `protocol.pipeline.owner`. This module carries
out their actions: calls to peers, downloads into slots, and commands to the trainer, in their order.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from node.ipc.activation_memory import ActivationMemory
from node.ipc.channel import AnchorApplied, ContributionHeader, FromTrainer, Ready, ToTrainer
from node.ipc.stage_messages import (
    ComputeStage,
    DrawMicrobatch,
    MicrobatchDrawn,
    StageComputed,
    StageStepped,
    TakeStageStep,
)
from node.monitoring.stage_table import StageEntry, build_stage_table, describe_waiting
from node.pipeline.activation_store import ActivationStore
from node.pipeline.calls import StageCalls
from node.pipeline.stage_peers import served_stages, stage_peers
from node.workers import BackgroundTasks
from protocol.blobs.download import Downloader
from protocol.blobs.store import BlobStore
from protocol.errors import MissingFileError, PeerFault, StorageError, UnreachableError
from protocol.identity import PeerId
from protocol.manifest import RunId
from protocol.membership.directory import PeerDirectory
from protocol.membership.peer_table import MembershipEvent
from protocol.pipeline import owner_events, server_events
from protocol.pipeline.ledger import Ledger
from protocol.pipeline.messages import Answer, HeldBlob, Key, Outcome, Task
from protocol.pipeline.owner import Owner
from protocol.pipeline.server import StageServer
from protocol.pipeline.stage_settings import StageSettings

logger = logging.getLogger(__name__)

FETCH_SECONDS = 60.0
NOT_READY_MS = 500
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.02, 0.1  # between two looks at the clock
SERIALS_BIT = 20  # serials begin at the milliseconds of the start, so a restarted peer repeats none
MORE_COMMANDS = 4  # beside those that draw: one task or step at a time
OWN = ""  # holder of the tokens of our own microbatches, beside their key at the server
SERVED_COUNTS = ("computed", "steps", "struck", "torn", "lost", "duplicates", "replayed", "invalid")
FETCH_ERRORS = (UnreachableError, PeerFault, MissingFileError, StorageError)


class StageTrainer(Protocol):
    """The process that computes; TrainerProcess."""

    async def send(self, message: ToTrainer) -> bool:
        """Send a message; return False if no trainer runs now."""


@dataclass(frozen=True, kw_only=True)
class PipelineParts:
    """The parts of a node and its replica that a pipeline uses."""

    directory: PeerDirectory
    calls: StageCalls
    downloader: Downloader
    activations: ActivationStore
    background: BackgroundTasks


class Pipeline:
    """The part of a replica that serves a stage and owns microbatches.

    The server exists from the first Ready of the trainer on; each further Ready begins a new life of it.
    """

    def __init__(self, settings: StageSettings, owner: Owner, parts: PipelineParts) -> None:
        self.settings = settings
        self.owner = owner
        self.server: StageServer | None = None
        self._parts = parts
        self._me = parts.directory.peer_id
        self._round = 0
        self._life = 0
        self._is_resting = self._is_stopped = False
        self._next_serial = int(time.time() * 1000) << SERIALS_BIT
        self._drawing: dict[int, int] = {}  # slots by serial
        self._computing: tuple[server_events.Compute, int | None] | None = None  # with the slot of its result
        self._commands: asyncio.Queue[ToTrainer] = asyncio.Queue(owner.settings.in_flight + MORE_COMMANDS)

    @property
    def memory(self) -> ActivationMemory:
        """Return the memory that the trainer shares."""
        return self._parts.activations.memory

    @property
    def store(self) -> BlobStore:
        """Return the blobs that other peers fetch."""
        return self._parts.activations.store

    def status_fields(self) -> dict[str, object]:
        """Return the counts and the rate for the status of this node."""
        own, served = self.owner.counts, self.server.counts if self.server else server_events.ServerCounts()
        counts = {name: getattr(own, name) for name in ("done", "torn", "lost", "duplicates", "replayed", "void")}
        counts |= {f"dropped: {reason}": count for reason, count in own.dropped.items()}
        counts |= {f"served: {name}": getattr(served, name) for name in SERVED_COUNTS}
        rate = self.server.rate if self.server else 0.0
        return {"microbatches": counts, "stage_rate": rate, "stages": self._stage_table()}

    def _stage_table(self) -> tuple[StageEntry, ...]:
        served = served_stages(self._parts.directory.live().values(), self.settings.stages)
        return build_stage_table(served, self.owner.waiting)

    def start(self, trainer: StageTrainer) -> None:
        """Begin to look at the clock and to pass commands to the trainer; call it on the network."""
        self._parts.directory.subscribe(self)
        self._parts.background.spawn(self._send_commands(trainer))
        self._parts.background.spawn(self._watch_clock())

    # Calls of other peers.

    def answer(self, task: Task) -> Answer:
        """Answer a task at once."""
        if self.server is None:
            return Answer("busy", 0, self._round, retry_ms=NOT_READY_MS)
        answer, actions = self.server.ask(task, time.monotonic())
        self._serve(actions)
        return answer

    def take_outcome(self, peer: PeerId, outcome: Outcome) -> None:
        """Take the outcome of a task of ours."""
        self._own(owner_events.Told(peer, outcome))

    def release(self, peer: PeerId, run: RunId, serials: tuple[int, ...]) -> None:
        """Forget microbatches of a peer that have ended."""
        if run == self.settings.run:
            self._feed(server_events.ReleasedBy(peer, serials))

    def take_invitation(self, peer: PeerId, run: RunId) -> None:
        """Send forwards to a peer that has room again."""
        self._own(owner_events.Invited(peer, run))

    # Events of this node.

    def on_membership_changed(self, events: Sequence[MembershipEvent]) -> None:
        """Tell both machines who serves which stage."""
        self._update_peers()

    def on_trainer_message(self, message: FromTrainer) -> None:
        """Take a message of the trainer."""
        match message:
            case Ready():
                self._on_ready(message.round)
            case AnchorApplied():
                self._set_round(message.round)
            case ContributionHeader() if self.server is not None:
                self.server.take_ledger()
            case MicrobatchDrawn():
                self._on_drawn(message)
            case StageComputed():
                self._on_computed(message)
            case StageStepped():
                self._feed(server_events.Stepped())

    def close_step(self) -> None:
        """End the open step early, because the round waits for our contribution."""
        self._feed(server_events.CloseStep())

    def stop(self) -> None:
        """Take no more work, because this peer leaves; owners learn it by the answers to their requests."""
        self._is_resting = self._is_stopped = True
        self._feed(server_events.Drain())

    def set_resting(self, is_resting: bool) -> None:
        """Begin no microbatches of our own until further notice, or go on."""
        self._is_resting = is_resting
        self._draw()

    def _on_ready(self, round_number: int) -> None:
        self._life = max(self._life + 1, int(time.time() * 1000))
        self._round = round_number
        for slot in self._drawing.values():
            self._parts.activations.give_back(slot)
        self._drawing.clear()
        if self._computing is not None and self._computing[1] is not None:
            self._parts.activations.give_back(self._computing[1])
        self._computing = None
        while not self._commands.empty():
            self._commands.get_nowait()
        if self.server is None:
            self.server = StageServer(self.settings, self._life, round_number, Ledger())
        else:
            self._feed(server_events.TrainerRestarted(self._life, Ledger()))
        self._parts.directory.publish(
            urgent=True, stage=self.settings.stage + 1, stage_life=self._life, stage_rate=self.server.rate
        )
        self._update_peers()

    def _set_round(self, number: int) -> None:
        self._round = number
        self._feed(server_events.RoundChanged(number))
        self._update_peers()

    def _update_peers(self) -> None:
        live = self._parts.directory.live()
        stages = stage_peers(live, self.settings.stages)
        self._own(owner_events.PeersChanged(stages, self._round))
        owners = frozenset(entry.peer for peers in stages for entry in peers)
        self._feed(server_events.OwnersChanged(owners | {self._me}))
        self._draw()

    # The owner.

    def _own(self, event: owner_events.Event) -> None:
        self._send(self.owner.handle(event, time.monotonic()))

    def _send(self, actions: Iterable[owner_events.Action]) -> None:
        spawn = self._parts.background.spawn
        for action in actions:
            match action:
                case owner_events.Ask(peer, task):
                    spawn(self._ask(peer, task))
                case owner_events.Release():
                    spawn(self._release(action))
                case owner_events.Finished(serial):
                    self._parts.activations.drop(Key(OWN, serial))
                    self._draw()
                case owner_events.StageEmpty(stage, waiting):
                    logger.info("nobody serves stage %d, and %s", stage, describe_waiting(waiting))

    async def _ask(self, peer: PeerId, task: Task) -> None:
        try:
            answer = self.answer(task) if peer == self._me else await self._parts.calls.ask(peer, task)
        except UnreachableError:
            self._own(owner_events.AskFailed(peer, task, unreachable=True))
        except PeerFault as fault:
            logger.info("%s refuses a task: %s", peer, fault)
            self._own(owner_events.AskFailed(peer, task, unreachable=False))
        else:
            self._own(owner_events.Answered(peer, task, answer))

    async def _release(self, action: owner_events.Release) -> None:
        run = self.owner.run_of(action.stage)
        if action.peer == self._me:
            self.release(self._me, run, tuple(action.serials))
            return
        try:
            await self._parts.calls.release(action.peer, run, action.serials)
        except (UnreachableError, PeerFault):
            self._own(owner_events.ReleaseFailed(action.peer, action.stage, action.serials))

    def _draw(self) -> None:
        """Let the trainer read as many microbatches as this peer may have on their way."""
        if self.server is None or self._is_resting:
            return
        for _ in range(self.owner.room - len(self._drawing)):
            serial, self._next_serial = self._next_serial, self._next_serial + 1
            slot = self._drawing[serial] = self._parts.activations.take_slot("tokens")
            self._commands.put_nowait(DrawMicrobatch(serial=serial, slot=slot))

    def _on_drawn(self, message: MicrobatchDrawn) -> None:
        slot = self._drawing.pop(message.serial, None)
        if slot is None:
            return  # of a trainer that died meanwhile
        blob = self._parts.activations.publish(Key(OWN, message.serial), slot)
        self._send(self.owner.begin(message.serial, HeldBlob(blob, self._me), time.monotonic()))

    # The server.

    def _feed(self, event: server_events.Event) -> None:
        if self.server is not None:
            self._serve(self.server.handle(event, time.monotonic()))

    def _serve(self, actions: Iterable[server_events.Action]) -> None:
        for action in actions:
            match action:
                case server_events.Fetch():
                    self._parts.background.spawn(self._fetch(action))
                case server_events.Compute():
                    self._compute(action)
                case server_events.TakeStep():
                    self._commands.put_nowait(TakeStageStep())
                case server_events.Tell(owner, outcome):
                    self._parts.background.spawn(self._tell(owner, outcome))
                case server_events.Invite(owner):
                    self._parts.background.spawn(self._invite(owner))
                case server_events.Drop(key, kept):
                    self._parts.activations.drop(key, kept)

    async def _fetch(self, action: server_events.Fetch) -> None:
        """Bring the inputs of a task into slots."""
        for name, held in action.inputs:
            if not await self._fetch_one(action.key, held):
                self._feed(server_events.FetchFailed(action.key, action.direction, action.token, name))
                return
        self._feed(server_events.Fetched(action.key, action.direction, action.token))

    async def _fetch_one(self, key: Key, held: HeldBlob) -> bool:
        activations, blob = self._parts.activations, held.blob
        if activations.has(blob.digest):
            activations.hold(key, blob.digest)
            return True
        if held.holder == self._me:
            return False

        def holders() -> list[PeerId]:
            return [held.holder]

        try:
            await self._parts.downloader.fetch(blob, holders, FETCH_SECONDS, wait_if_absent=False)
            activations.take_over(key, blob)
        except FETCH_ERRORS as error:
            logger.info("an activation of %s is missing: %s", held.holder, error)
            return False
        return True

    def _compute(self, action: server_events.Compute) -> None:
        task, activations = action.task, self._parts.activations
        size = self.settings.result_bytes(task.direction)
        output = activations.take_slot("activation") if size else None
        self._computing = action, output
        slots = {name: activations.slot_of(held.blob) for name, held in task.inputs.named().items()}
        self._commands.put_nowait(
            ComputeStage(
                task=action.token,
                is_backward=task.direction == "backward",
                adds=action.adds,
                activation=slots.get("activation"),
                tokens=slots.get("tokens"),
                gradient=slots.get("gradient"),
                output=output,
                loss=task.loss,
            )
        )

    def _on_computed(self, message: StageComputed) -> None:
        if self._computing is None or self._computing[0].token != message.task:
            return  # of a trainer that died meanwhile
        (action, output), self._computing = self._computing, None
        task, result = action.task, None
        if output is not None and message.fault:
            self._parts.activations.give_back(output)
        elif output is not None:
            result = self._parts.activations.publish(task.key, output)
        self._feed(
            server_events.Computed(
                task.key,
                task.direction,
                action.token,
                valid=not message.fault,
                result=result,
                loss=message.loss,
                compute_ms=1000 * message.seconds,
            )
        )

    async def _tell(self, owner: PeerId, outcome: Outcome) -> None:
        if owner == self._me:
            self.take_outcome(self._me, outcome)
            return
        try:
            await self._parts.calls.tell(owner, outcome)
        except (UnreachableError, PeerFault) as error:
            logger.debug("%s has not been told an outcome, and will ask again: %s", owner, error)

    async def _invite(self, owner: PeerId) -> None:
        if owner == self._me:
            self.take_invitation(self._me, self.settings.run)
            return
        try:
            await self._parts.calls.invite(owner, self.settings.run)
        except (UnreachableError, PeerFault) as error:
            logger.debug("%s has not been invited, and will ask again: %s", owner, error)

    # Time.

    async def _send_commands(self, trainer: StageTrainer) -> None:
        while True:
            await trainer.send(await self._commands.get())

    async def _watch_clock(self) -> None:
        while not self._is_stopped:
            now = time.monotonic()
            self._send(self.owner.handle(owner_events.Tick(), now))
            self._feed(server_events.Tick())
            self._publish_rate()
            deadlines = [self.owner.next_deadline(), self.server.next_deadline() if self.server else None]
            left = min((at - now for at in deadlines if at is not None), default=MAX_PAUSE_SECONDS)
            await asyncio.sleep(min(MAX_PAUSE_SECONDS, max(MIN_PAUSE_SECONDS, left)))

    def _publish_rate(self) -> None:
        if self.server is not None:
            self._parts.directory.update(stage_rate=self.server.rate)

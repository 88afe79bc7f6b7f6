"""One peer of a pipeline: it serves its stage, and sends microbatches of its own text through all stages.

The decisions are made by two machines, `protocol.pipeline.stages.server` and `protocol.pipeline.owner`. This module
carries out their actions: calls to peers, downloads into slots, and commands to the trainer, in their order.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence

from node.daemon.stages.calls import Calls, OwnCalls
from node.daemon.stages.fetching import ActivationFetcher
from node.daemon.stages.microbatch_counts import count_microbatches
from node.daemon.stages.parts import PipelineParts, StageTrainer
from node.daemon.stages.stage_peers import served_stages, stage_peers
from node.monitoring.stage_table import build_stage_table, describe_waiting
from node.trainer.ipc.activation_memory import ActivationMemory
from node.trainer.ipc.channel import AnchorApplied, ContributionHeader, FromTrainer, Ready
from node.trainer.ipc.stage_messages import (
    ComputeStage,
    DrawMicrobatch,
    MicrobatchDrawn,
    StageCommand,
    StageComputed,
    StageStepped,
    TakeStageStep,
)
from protocol.blobs.store import BlobStore
from protocol.errors import MalformedError, PeerFault, UnreachableError
from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.membership.peer_table import MembershipEvent, PeerLeft
from protocol.murmur_pb2 import StepStatement
from protocol.pipeline import owner_events
from protocol.pipeline.ledger import Ledger
from protocol.pipeline.messages import Answer, HeldBlob, Key, Outcome, Task, first_serial
from protocol.pipeline.owner import Owner
from protocol.pipeline.routing import StagePeer
from protocol.pipeline.stages import server_events
from protocol.pipeline.stages.server import StageServer
from protocol.pipeline.stages.settings import StageSettings

logger = logging.getLogger(__name__)

NOT_READY_MS = 500
DRAIN_SECONDS = 8.0  # less than the ten seconds that a service manager waits before it kills
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.02, 0.1  # between two looks at the clock
MORE_COMMANDS = 4  # beside those that draw: one task or step at a time
OWN = ""  # holder of the tokens of our own microbatches, beside their key at the server
StagePeers = tuple[tuple[StagePeer, ...], ...]


class Pipeline:
    """The part of a replica that serves a stage and owns microbatches.

    The server exists from the first Ready of the trainer on; each further Ready begins a new life of it.
    """

    def __init__(self, settings: StageSettings, owner: Owner, parts: PipelineParts) -> None:
        self.settings = settings
        self.owner = owner
        self.server: StageServer | None = None
        self._parts = parts
        self._me = parts.node.directory.peer_id
        self._own_calls = OwnCalls(parts.node)
        self._fetcher = ActivationFetcher(parts.node, parts.downloader, parts.activations)
        self._round = self._life = 0
        self._start = 0  # that of the trainer whose Ready is the newest
        self._is_resting = self._is_stopped = self._is_repeat_due = False
        self._first_serial = self._next_serial = first_serial(parts.node.directory.start)
        self._drawing: dict[int, int] = {}  # slots by serial
        self._computing: tuple[server_events.Compute, int | None] | None = None  # with the slot of its result
        self._commands: asyncio.Queue[StageCommand] = asyncio.Queue(owner.settings.in_flight + MORE_COMMANDS)

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
        counts = count_microbatches(self.owner.counts, self.server.counts if self.server else None)
        rate = self.server.rate if self.server else 0.0
        live = served_stages(self._parts.node.directory.live().values(), self.settings.stages)
        stages = build_stage_table(live, self.owner.waiting)
        return {"microbatches": counts, "stage_rate": rate, "stages": stages}

    def start(self, trainer: StageTrainer) -> None:
        """Begin to look at the clock and to pass commands to the trainer; call it on the network."""
        self._parts.node.directory.subscribe(self)
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

    def take_statement(self, peer: PeerId, body: StepStatement) -> None:
        raise MalformedError("a statement about a step, where steps are not exact")

    # Events of this node.

    def on_membership_changed(self, events: Sequence[MembershipEvent]) -> None:
        """Tell both machines who serves which stage, and wait no longer for activations of peers that are gone."""
        for event in events:
            if isinstance(event, PeerLeft):
                self._fetcher.drop_peer(event.peer)
        self._update_peers()

    def on_trainer_message(self, message: FromTrainer) -> None:
        """Take a message of the trainer."""
        match message:
            case Ready():
                self._on_ready(message)
            case AnchorApplied():
                self._set_round(message.round)
            case ContributionHeader() if self.server is not None:
                self._on_contribution(self.server)
            case MicrobatchDrawn():
                self._on_drawn(message)
            case StageComputed():
                self._on_computed(message)
            case StageStepped():
                self._feed(server_events.Stepped())

    def close_step(self) -> None:
        """End the open step early, because the round waits for our contribution."""
        self._feed(server_events.CloseStep())

    async def drain(self) -> None:
        """Take no new work, and finish what others would have to make again; takes at most DRAIN_SECONDS."""
        if self.server is None or self._is_stopped:
            return
        self._is_resting = True
        self._parts.node.directory.publish(urgent=True, resting=True)
        self._feed(server_events.Drain())
        self._send(self.owner.leave(time.monotonic()))
        deadline = time.monotonic() + DRAIN_SECONDS
        while not (self.server.is_idle and not self.owner.open_serials) and time.monotonic() < deadline:
            await asyncio.sleep(MIN_PAUSE_SECONDS)

    def stop(self) -> None:
        """Take no more work, because this peer leaves; owners learn it by the answers to their requests."""
        self._is_resting = self._is_stopped = True
        self._feed(server_events.Drain())

    def set_resting(self, is_resting: bool) -> None:
        """Begin no microbatches of our own until further notice, or go on."""
        self._is_resting = is_resting
        self._draw()

    def _on_contribution(self, server: StageServer) -> None:
        """Begin a new ledger, unless a restarted trainer repeats its last contribution, which its ledgers know."""
        if not self._is_repeat_due:
            server.take_ledger()
        self._is_repeat_due = False

    def _on_ready(self, message: Ready) -> None:
        self._round, self._start = message.round, message.start
        self._is_repeat_due = message.outstanding is not None
        for slot in self._drawing.values():
            self._parts.activations.give_back(slot)
        self._drawing.clear()
        if self._computing is not None and self._computing[1] is not None:
            self._parts.activations.give_back(self._computing[1])
        self._computing = None
        while not self._commands.empty():
            self._commands.get_nowait()
        self._begin_life(Ledger.from_text(message.ledger), Ledger.from_text(message.contributed))
        self._update_peers()

    def _begin_life(self, ledger: Ledger, contributed: Ledger) -> None:
        """Void what this stage said before about microbatches, but for those in the ledgers, and let the others know.

        Args:
            ledger: microbatches of the steps that the trainer will contribute.
            contributed: those of its last contribution.
        """
        self._life = max(self._life + 1, int(time.time() * 1000))
        if self.server is None:
            self.server = self._build_server(self._round)
        self._feed(server_events.TrainerRestarted(self._life, ledger, contributed))
        if self.server.round != self._round:  # it died after it had applied an anchor, before it could say so
            self._set_round(self._round)
        self._parts.board.publish(
            urgent=True, stage=self.settings.stage + 1, stage_life=self._life, stage_rate=self.server.rate
        )

    def _build_server(self, number: int) -> StageServer:
        return StageServer(self.settings, self._life, number, Ledger())

    def _set_round(self, number: int) -> None:
        self._round = number
        self._feed(server_events.RoundChanged(number))
        self._update_peers()

    def _update_peers(self) -> None:
        live = self._parts.node.directory.live()
        stages = stage_peers(live, self.settings.stages)
        self._own(owner_events.PeersChanged(self._own_routes(stages), self._round))
        owners = {entry.peer: first_serial(live[entry.peer].start) for peers in stages for entry in peers}
        self._feed(server_events.OwnersChanged(owners | {self._me: self._first_serial}))
        self._draw()

    def _own_routes(self, stages: StagePeers) -> StagePeers:
        """Return the peers for our own microbatches: ourselves alone if we serve all stages."""
        if len(self._parts.node) < self.settings.stages:
            return stages
        return tuple(tuple(entry for entry in peers if entry.peer == self._me) for peers in stages)

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
                case owner_events.Finished(serial, _, reason):
                    self._parts.activations.drop(Key(OWN, serial))
                    if reason == "refused":
                        logger.warning("three peers refused microbatch %d; it is dropped", serial)
                    self._draw()
                case owner_events.WrongResult(peer):
                    self._parts.node.directory.record_refusal(peer, MalformedError("a result of a wrong size"))
                case owner_events.StageEmpty(stage, waiting):
                    logger.info("nobody serves stage %d, and %s", stage, describe_waiting(waiting))

    def _calls_to(self, peer: PeerId) -> Calls:
        return self._own_calls if peer == self._me else self._parts.calls

    async def _ask(self, peer: PeerId, task: Task) -> None:
        try:
            answer = await self._calls_to(peer).ask(peer, task)
        except UnreachableError:
            self._own(owner_events.AskFailed(peer, task, unreachable=True))
        except PeerFault as fault:
            logger.info("%s refuses a task: %s", peer, fault)
            self._own(owner_events.AskFailed(peer, task, unreachable=False))
        else:
            self._own(owner_events.Answered(peer, task, answer))

    async def _release(self, action: owner_events.Release) -> None:
        run = self.owner.run_of(action.stage)
        try:
            await self._calls_to(action.peer).release(action.peer, run, action.serials)
        except (UnreachableError, PeerFault):
            self._own(owner_events.ReleaseFailed(action.peer, action.stage, action.serials))

    def _draw(self) -> None:
        """Let the trainer read as many microbatches as this peer may have on their way."""
        if self.server is None or self._is_resting or not self._parts.node.owns_microbatches(self.settings.stage):
            return
        for _ in range(self.owner.room - len(self._drawing)):
            serial, self._next_serial = self._next_serial, self._next_serial + 1
            slot = self._drawing[serial] = self._parts.activations.take_slot("tokens")
            self._order(DrawMicrobatch(serial=serial, slot=slot))

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
                    self._order(TakeStageStep(round=self._round))
                case server_events.Tell(owner, outcome):
                    self._parts.background.spawn(self._tell(owner, outcome))
                case server_events.Invite(owner):
                    self._parts.background.spawn(self._invite(owner))
                case server_events.Drop(key, kept):
                    self._parts.activations.drop(key, kept)

    async def _fetch(self, action: server_events.Fetch) -> None:
        missing = await self._fetcher.fetch(action.key, action.inputs)
        if missing is None:
            self._feed(server_events.Fetched(action.key, action.direction, action.token))
        else:
            self._feed(server_events.FetchFailed(action.key, action.direction, action.token, missing))

    def _compute(self, action: server_events.Compute) -> None:
        task, activations = action.task, self._parts.activations
        size = self.settings.result_bytes(task.direction)
        output = activations.take_slot("activation") if size else None
        self._computing = action, output
        slots = {name: activations.slot_of(held.blob) for name, held in task.inputs.named().items()}
        self._order(ComputeStage.of(action, slots, output, self._round))

    def _on_computed(self, message: StageComputed) -> None:
        if self._computing is None or self._computing[0].token != message.task:
            return  # of a trainer that died meanwhile
        (action, output), self._computing = self._computing, None
        task, result = action.task, None
        if message.fault == "wrong input":
            self._fetcher.blame_holders(task.inputs)
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
        self._publish_rate()

    def _publish_rate(self) -> None:
        if self.server is not None:
            self._parts.board.update(stage_rate=self.server.rate)

    async def _tell(self, owner: PeerId, outcome: Outcome) -> None:
        try:
            await self._calls_to(owner).tell(owner, outcome)
        except (UnreachableError, PeerFault) as error:
            logger.debug("%s has not been told an outcome, and will ask again: %s", owner, error)

    async def _invite(self, owner: PeerId) -> None:
        try:
            await self._calls_to(owner).invite(owner, self.settings.run)
        except (UnreachableError, PeerFault) as error:
            logger.debug("%s has not been invited, and will ask again: %s", owner, error)

    def _order(self, command: StageCommand) -> None:
        """Send a command to this start of the trainer; the next one ignores it."""
        self._commands.put_nowait(command.model_copy(update={"start": self._start}))

    # Time.

    async def _send_commands(self, trainer: StageTrainer) -> None:
        while True:
            await trainer.send(await self._commands.get())

    async def _watch_clock(self) -> None:
        while not self._is_stopped:
            now = time.monotonic()
            self._send(self.owner.handle(owner_events.Tick(), now))
            self._feed(server_events.Tick())
            deadlines = [self.owner.next_deadline(), self.server.next_deadline() if self.server else None]
            left = min((at - now for at in deadlines if at is not None), default=MAX_PAUSE_SECONDS)
            await asyncio.sleep(min(MAX_PAUSE_SECONDS, max(MIN_PAUSE_SECONDS, left)))

"""Carry out the actions of the stage loop: calls to peers, downloads into slots, and commands to the trainer.

Results come back as events through the replica's inbox. `NodeStages` passes each call about microbatches to the replica
of the stage that it names. Calls of this node to itself take the same path without the network.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from node.daemon.checkpoints.vote_log import ContradictionFile
from node.daemon.inbox import Inbox
from node.daemon.peers.admitted_peers import AdmittedPeers
from node.daemon.stages.activations import ActivationFetcher, ActivationStore, NodeBlobs
from node.daemon.stages.calls import StageCalls
from node.daemon.stages.refusals import maker_of, refusing_errors
from node.daemon.stages.stage_peers import served_stages, stage_peers
from node.daemon.stages.stage_record import StageRecord, StageRecords
from node.loop.stage_events import (
    AnswerTask,
    DeadlinePassed,
    Draining,
    DrawTokens,
    DropTokens,
    Leaving,
    PeersSeen,
    PublishLife,
    PublishRate,
    ReportRefused,
    RestingChanged,
    StageAction,
    StageAnchorApplied,
    StageContributed,
    StageEvent,
    StatementReceived,
    TaskAsked,
    TokensDrawn,
    TrainerReady,
)
from node.loop.stage_loop import NOT_READY_MS, StageLoop
from node.monitoring.stage_table import build_stage_table, describe_waiting
from node.processes.workers import BackgroundTasks
from node.trainer.ipc.activation_memory import ActivationMemory
from node.trainer.ipc.channel import AnchorApplied, ContributionHeader, FromTrainer, Ready, ToTrainer
from node.trainer.ipc.stage_messages import (
    ComputeStage,
    DrawMicrobatch,
    DropStageSum,
    MicrobatchDrawn,
    StageCommand,
    StageComputed,
    StageStepped,
    TakeStageStep,
)
from protocol import murmur_pb2 as wire
from protocol.blobs.store import BlobStore
from protocol.errors import ContradictedError, MalformedError, PeerFault, StaleError, StorageError, UnreachableError
from protocol.identity import Identity, PeerId
from protocol.manifest.run import RunId
from protocol.membership.directory import PeerDirectory
from protocol.membership.peer_table import MembershipEvent, PeerLeft
from protocol.murmur_pb2 import StepStatement
from protocol.pipeline import owner_events, server_events
from protocol.pipeline.exact import SendStatement, Statement, StepDecisions, StepReports
from protocol.pipeline.ledger import Ledger
from protocol.pipeline.messages import Answer, Key, Outcome, Task, first_serial, question_of
from protocol.pipeline.owner_events import OwnerCounts
from protocol.pipeline.results import (
    MAX_KIND_CHARACTERS,
    Contradiction,
    ResultValue,
    SignedResult,
    StageResult,
    contradictions,
    sign_result,
)
from protocol.pipeline.server_events import ServerCounts

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 8.0  # less than the ten seconds that a service manager waits before it kills
MIN_PAUSE_SECONDS = 0.001  # until a deadline, so that one in the past cannot occupy the daemon
MORE_COMMANDS = 4  # in addition to draws; the trainer has one task or step at a time
OWN = ""  # owner in the keys of our own tokens, so that they differ from the keys of tasks that we serve
OWN_COUNTS = (
    *("done", "partly counted", "lost", "duplicates", "replayed", "outdated", "overdue"),
    *("audited", "contradicted", "unaudited"),
)
SERVED_COUNTS = (
    *("computed", "steps", "withdrawn", "partly counted", "lost", "duplicates", "replayed", "invalid"),
    *("subtracted", "left behind", "turned away", "without forward", "clipped"),
)


class StageEffects:
    """Serves a stage and owns microbatches for one replica; runs the timer of its loop."""

    def __init__(
        self,
        loop: StageLoop,
        node: "NodeStages",
        record: StageRecord,
        fetcher: ActivationFetcher,
        identity: Identity,
        background: BackgroundTasks,
        inbox: Inbox,
    ) -> None:
        self.loop = loop
        self.activations: ActivationStore = fetcher.activations
        self._node = node
        self._directory: PeerDirectory = node.directory
        self._record = record
        self._fetcher = fetcher
        self._identity = identity
        self._base = b""  # digest of the chain whose weights the trainer has; empty if it is not known
        self._kind = ""  # of the trainer's device
        self._background = background
        self._inbox = inbox
        self._commands = asyncio.Queue[StageCommand](loop.owner.settings.in_flight + MORE_COMMANDS)
        self._start = 0  # start id of the current trainer
        self._drawing: dict[int, int] = {}  # slots by serial
        self._computing: tuple[server_events.Compute, int | None] | None = None  # with the slot of its result
        self._answer: Answer | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._drained = asyncio.Event()

    @property
    def memory(self) -> ActivationMemory:
        """The memory that the trainer shares."""
        return self.activations.memory

    @property
    def store(self) -> BlobStore:
        """The blobs that other peers fetch."""
        return self.activations.store

    def status_fields(self) -> dict[str, object]:
        """Return the counts and the rate for the status of this node."""
        owner, server = self.loop.owner, self.loop.server
        live = served_stages(self._node.admitted.records().values(), self.loop.settings.stages)
        return {
            "microbatches": count_microbatches(owner.counts, server.counts if server else None),
            "stage_rate": server.rate if server else 0.0,
            "stages": build_stage_table(live, owner.waiting),
        }

    def start(self, send: Callable[[ToTrainer], Awaitable[bool]]) -> None:
        """Follow the peers' records, and pass commands to the trainer by `send`; call it on the network."""
        self._directory.subscribe(self)
        self._background.spawn(self._send_commands(send))
        self._see_peers()

    def post(self, event: StageEvent) -> None:
        """Let the inbox pass an event to `handle`."""
        self._inbox.post(event)

    def handle(self, event: StageEvent) -> None:
        """Pass an event to the loop, and carry out its actions; an error that a peer's event causes is refused."""
        actions: list[StageAction] = []
        if isinstance(event, TaskAsked):
            self._answer = Answer("refused", self.loop.life, self.loop.round)  # unless the loop answers it
        with refusing_errors(self._directory, maker_of(event)):
            actions = self.loop.handle(event, asyncio.get_running_loop().time())
        for action in actions:
            self._run(action)
        if self.loop.is_resting and self.loop.is_drained:
            self._drained.set()
        self._set_timer()

    # Calls of other peers.

    def answer(self, task: Task) -> Answer:
        """Answer a task at once."""
        self._answer = None
        self.post(TaskAsked(task))
        # Before the replica is complete, its inbox only collects events.
        return self._answer or Answer("busy", 0, self.loop.round, retry_ms=NOT_READY_MS)

    def take_statement(self, peer: PeerId, body: StepStatement) -> None:
        """Post another server's statement about its sum. Raises MalformedError."""
        if self._record.decisions is None:
            raise MalformedError("a statement about a step, where steps are not exact")
        self.post(StatementReceived(peer, Statement.from_wire(body, self.loop.settings.step_size)))

    # Events of this node.

    def on_membership_changed(self, events: Sequence[MembershipEvent]) -> None:
        """Cancel downloads from peers that left, and update the loop's peers."""
        for event in events:
            if isinstance(event, PeerLeft):
                self._fetcher.drop_peer(event.peer)
        self._see_peers()

    def _see_peers(self) -> None:
        live, stages = self._node.admitted.records(), self.loop.settings.stages
        answering = {self._directory.peer_id, *self._node.calls.answering}
        seen, standing = stage_peers(live, stages, answering), self._node.admitted.standing_records()
        serials = {entry.peer: first_serial(live[entry.peer].start) for peers in seen for entry in peers}
        decisions = self._record.decisions
        reports = decisions.reports() if decisions is not None else StepReports(stages)
        self.post(PeersSeen(seen, serials, reports, len(self._node) == stages, frozenset(standing)))

    def on_trainer_message(self, message: FromTrainer) -> None:
        """Turn a message of the trainer into an event."""
        match message:
            case Ready():
                self._on_ready(message)
            case AnchorApplied():
                self._base = bytes.fromhex(message.base)
                self.post(StageAnchorApplied(message.round, _wall_ms(), message.exact_step))
                self._see_peers()
            case ContributionHeader():
                self.post(StageContributed(message.round, bytes.fromhex(message.ledger)))
            case MicrobatchDrawn():
                self._on_drawn(message)
            case StageComputed():
                self._on_computed(message)
            case StageStepped():
                self.post(server_events.Stepped())

    def close_step(self) -> None:
        """End the open step early, because the round waits for our contribution."""
        self.post(server_events.CloseStep())

    def set_resting(self, is_resting: bool) -> None:
        """Pause or resume our own microbatches."""
        self.post(RestingChanged(is_resting))

    async def drain(self) -> None:
        """Refuse new work, and finish the work that peers would have to repeat, within DRAIN_SECONDS."""
        if self.loop.server is None or self.loop.is_leaving:
            return
        self._drained.clear()
        self._directory.publish(urgent=True, resting=True)
        self.post(Draining())
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                await self._drained.wait()
        except TimeoutError:
            logger.info("leaving with work for others unfinished after %.0f seconds", DRAIN_SECONDS)

    def stop(self) -> None:
        """Refuse all work, because this peer leaves; owners notice it from the answers to their requests."""
        self.post(Leaving())

    def _on_ready(self, message: Ready) -> None:
        self._forget_commands()
        self._start, self._base, self._kind = message.start, b"", message.device_kind[:MAX_KIND_CHARACTERS]
        self.post(
            TrainerReady(
                message.round,
                _wall_ms(),
                Ledger.from_text(message.ledger),
                Ledger.from_text(message.contributed),
                repeats=message.outstanding is not None,
                exact_step=message.exact_step,
            )
        )
        self._see_peers()  # its own entry has changed

    def _forget_commands(self) -> None:
        """Free the slots that the previous trainer should have written."""
        for slot in self._drawing.values():
            self.activations.give_back(slot)
        self._drawing.clear()
        if self._computing is not None and self._computing[1] is not None:
            self.activations.give_back(self._computing[1])
        self._computing = None
        while not self._commands.empty():
            self._commands.get_nowait()

    def _on_drawn(self, message: MicrobatchDrawn) -> None:
        slot = self._drawing.pop(message.serial, None)
        if slot is not None:  # otherwise an earlier trainer has drawn it
            blob = self.activations.publish(Key(OWN, message.serial), slot)
            self.post(TokensDrawn(message.serial, blob))

    def _on_computed(self, message: StageComputed) -> None:
        if self._computing is None or self._computing[0].token != message.task:
            return  # an earlier trainer has computed it
        (action, output), self._computing = self._computing, None
        task, result = action.task, None
        if message.wrong is not None:
            self._fetcher.blame_maker(task, message.wrong)
        if output is not None and message.fault:
            self.activations.give_back(output)
        elif output is not None:
            result = self.activations.publish(task.key, output)
        self.post(
            server_events.Computed(
                task.key,
                task.direction,
                action.token,
                valid=not message.fault,
                result=result,
                loss=message.loss,
                compute_ms=1000 * message.seconds,
                clipped=message.clipped,
                signed=None if message.fault else self._sign(task, ResultValue(result, message.loss)),
            )
        )

    def _sign(self, task: Task, value: ResultValue) -> SignedResult:
        """Sign the result of a task."""
        question = question_of(task, self._base, self._kind)
        return sign_result(self._identity, self.loop.settings.run, StageResult(question, value))

    # Actions.

    def _run(self, action: StageAction) -> None:
        spawn = self._spawn
        match action:
            case owner_events.Ask(peer, task):
                spawn(peer, partial(self._ask, peer, task), owner_events.AskFailed(peer, task, unreachable=False))
            case owner_events.Release(peer, stage, serials):
                spawn(peer, partial(self._release, action), owner_events.ReleaseFailed(peer, stage, serials))
            case owner_events.Probe(peer, stage):
                spawn(peer, partial(self._probe, action), owner_events.Probed(peer, stage, answers=False))
            case server_events.FetchInputs(key, direction, token, inputs):
                missing = server_events.InputMissing(key, direction, token, inputs[0][0])
                spawn(key.owner, partial(self._fetch, action), missing)
            case server_events.SendOutcome(owner, outcome):
                spawn(owner, partial(self._tell, owner, outcome))
            case server_events.Invite(owner):
                spawn(owner, partial(self._invite, owner))
            case SendStatement(peers, statement):
                for peer in peers:
                    spawn(peer, partial(self._state, peer, statement))
            case server_events.Drop(key, kept):
                self.activations.drop(key, kept)
            case DropTokens(serial):
                self.activations.drop(Key(OWN, serial))
            case AnswerTask(answer):
                self._answer = answer
            case DrawTokens() | server_events.Compute() | server_events.TakeStep() | server_events.DropSum():
                self._command(action)
            case _:
                self._report(action)

    def _command(
        self, action: DrawTokens | server_events.Compute | server_events.TakeStep | server_events.DropSum
    ) -> None:
        match action:
            case DrawTokens(serial, window):
                slot = self._drawing[serial] = self.activations.take_slot("tokens")
                self._order(DrawMicrobatch(serial=serial, slot=slot, window=window))
            case server_events.Compute():
                self._compute(action)
            case server_events.TakeStep():
                self._order(TakeStageStep(round=self.loop.round))
            case server_events.DropSum():
                self._order(DropStageSum(round=self.loop.round))

    def _report(
        self,
        action: PublishLife
        | PublishRate
        | ReportRefused
        | owner_events.StageEmpty
        | owner_events.WrongResult
        | owner_events.ResultsDiffer
        | server_events.TrainerEnded,
    ) -> None:
        match action:
            case PublishLife(life, rate):
                self._record.publish(urgent=True, stage=self.loop.settings.stage + 1, stage_life=life, stage_rate=rate)
            case PublishRate(rate):
                self._record.update(stage_rate=rate)
            case ReportRefused(serial):
                logger.warning("three peers refused microbatch %d; it is dropped", serial)
            case owner_events.StageEmpty(stage, waiting):
                logger.info("nobody serves stage %d, and %s", stage, describe_waiting(waiting))
            case server_events.TrainerEnded(owner):
                if owner != self._directory.peer_id:
                    self._directory.record_refusal(owner, MalformedError("a task of which the trainer dies"))
            case owner_events.WrongResult(peer):
                self._directory.record_refusal(peer, MalformedError("a result of a wrong size"))
            case owner_events.ResultsDiffer():
                self._on_difference(action)

    def _on_difference(self, action: owner_events.ResultsDiffer) -> None:
        """Count results that most servers contradict, and exclude the keys that the voters contradict."""
        for peer in sorted(action.wrong):
            self._directory.record_refusal(peer, ContradictedError("a result that most servers contradict"))
        for found in contradictions(self.loop.owner.run_of(action.stage), action.results):
            try:
                if self._node.admitted.exclude(found, action.stage):
                    self.announce_excluded(found)
            except StaleError as error:
                logger.debug("%s is not excluded: %s", found.liar, error)

    def take_contradiction(self, found: Contradiction) -> None:
        """Exclude a key, as another peer has found out, and pass that on. Raises MalformedError or StaleError."""
        stage = self.loop.owner.stage_of(found.run)
        if stage is None:
            raise MalformedError("a contradiction of another run")
        if self._node.admitted.exclude(found, stage):
            self.announce_excluded(found)

    def announce_excluded(self, found: Contradiction) -> None:
        """Report an excluded key, and tell all other peers once why."""
        fault = ContradictedError("excluded, because two thirds of the voters contradict its result")
        self._directory.record_refusal(found.liar, fault)
        self._background.spawn(self._node.keep_excluded())
        for peer in sorted(self._node.admitted.records().keys() - {self._directory.peer_id}):
            self._spawn(peer, partial(self._contradict, peer, found))
        self._see_peers()

    async def _contradict(self, peer: PeerId, found: Contradiction) -> None:
        try:
            await self._node.calls.contradict(peer, found)
        except (UnreachableError, PeerFault) as error:
            logger.debug("%s does not learn that %s is excluded: %s", peer, found.liar, error)

    def _spawn(self, maker: PeerId, work: Callable[[], Awaitable[None]], failed: StageEvent | None = None) -> None:
        """Run a task that depends on a peer; an error in it is refused, and the loop hears `failed`."""
        self._background.spawn(self._refusing_errors(maker, work, failed))

    async def _refusing_errors(
        self, maker: PeerId, work: Callable[[], Awaitable[None]], failed: StageEvent | None
    ) -> None:
        with refusing_errors(self._directory, maker):
            await work()
            return
        if failed is not None:
            self.post(failed)

    def _compute(self, action: server_events.Compute) -> None:
        """Let the trainer compute a task; one that cannot be computed here has an invalid result."""
        task, activations = action.task, self.activations
        with refusing_errors(self._directory, task.owner):
            slots = {name: activations.slot_of(held.blob) for name, held in task.inputs.named().items()}
            size = self.loop.settings.result_bytes(task.direction)
            output = activations.take_slot("activation") if size else None
            self._computing = action, output
            self._order(ComputeStage.of(action, slots, output, self.loop.round))
            return
        self.post(server_events.Computed(task.key, task.direction, action.token, False, None, None, 0.0))

    def _order(self, command: StageCommand) -> None:
        """Queue a command for this start of the trainer; a restarted trainer ignores it."""
        self._commands.put_nowait(command.model_copy(update={"start": self._start}))

    async def _send_commands(self, send: Callable[[ToTrainer], Awaitable[bool]]) -> None:
        while True:
            await send(await self._commands.get())

    async def _fetch(self, action: server_events.FetchInputs) -> None:
        missing = await self._fetcher.fetch(action.key, action.inputs)
        if missing is None:
            self.post(server_events.InputsFetched(action.key, action.direction, action.token))
        else:
            self.post(server_events.InputMissing(action.key, action.direction, action.token, missing))

    async def _ask(self, peer: PeerId, task: Task) -> None:
        try:
            answer = await self._node.ask(peer, task)
        except UnreachableError:
            self.post(owner_events.AskFailed(peer, task, unreachable=True))
        except PeerFault as fault:
            logger.info("%s refuses a task: %s", peer, fault)
            self.post(owner_events.AskFailed(peer, task, unreachable=True))
        else:
            self.post(owner_events.Answered(peer, task, answer))

    async def _release(self, action: owner_events.Release) -> None:
        try:
            await self._node.send_release(action.peer, self.loop.owner.run_of(action.stage), action.serials)
        except (UnreachableError, PeerFault):
            self.post(owner_events.ReleaseFailed(action.peer, action.stage, action.serials))

    async def _probe(self, action: owner_events.Probe) -> None:
        peer, stage = action.peer, action.stage
        try:
            await self._node.send_release(peer, self.loop.owner.run_of(stage), frozenset())
        except (UnreachableError, PeerFault) as error:
            logger.debug("%s does not answer a probe: %s", peer, error)
            self.post(owner_events.Probed(peer, stage, answers=False))
        else:
            self.post(owner_events.Probed(peer, stage, answers=True))

    async def _tell(self, owner: PeerId, outcome: Outcome) -> None:
        try:
            await self._node.send_outcome(owner, outcome)
        except (UnreachableError, PeerFault) as error:
            logger.debug("%s has not got an outcome, and will ask again: %s", owner, error)

    async def _invite(self, owner: PeerId) -> None:
        try:
            await self._node.send_invitation(owner, self.loop.settings.run)
        except (UnreachableError, PeerFault) as error:
            logger.debug("%s has not been invited, and will ask again: %s", owner, error)

    async def _state(self, peer: PeerId, statement: Statement) -> None:
        try:
            await self._node.calls.state(peer, statement)
        except (UnreachableError, PeerFault):
            return  # the agreement repeats its statements

    # Time.

    def _set_timer(self) -> None:
        deadline, clock = self.loop.next_deadline(), asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() == deadline:
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer = clock.call_at(max(deadline, clock.time() + MIN_PAUSE_SECONDS), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.post(DeadlinePassed())


class NodeStages:
    """The stages of a node by run id; it passes each call about microbatches to the stage that the call names.

    `contradictions`: the file that keeps the excluded keys; None where nothing is kept.
    """

    def __init__(
        self,
        admitted: AdmittedPeers,
        calls: StageCalls,
        decisions: StepDecisions | None = None,
        contradictions: ContradictionFile | None = None,
    ) -> None:
        self.admitted = admitted
        self._contradictions = contradictions
        self._saving = asyncio.Lock()
        self.directory = directory = admitted.directory
        self.calls = calls
        self.records = StageRecords(directory, decisions)
        self.blobs = NodeBlobs()
        self._stages: dict[RunId, StageEffects] = {}

    def __bool__(self) -> bool:
        return bool(self._stages)

    def __len__(self) -> int:
        return len(self._stages)

    def add(self, run: RunId, stage: StageEffects) -> None:
        """Pass the calls for a stage to its replica; the first one owns the microbatches of this node."""
        self._stages[run] = stage
        self.blobs.add(stage.store)

    # Calls of peers.

    @property
    def _owner(self) -> StageEffects:
        return next(iter(self._stages.values()))

    def answer(self, task: Task) -> Answer:
        """Answer a task at once; the first stage refuses tasks of stages that this node does not serve."""
        return self._stages.get(task.run, self._owner).answer(task)

    def take_outcome(self, peer: PeerId, outcome: Outcome) -> None:
        """Pass on the outcome of one of our tasks."""
        self._owner.post(owner_events.OutcomeReceived(peer, outcome))

    def release(self, peer: PeerId, run: RunId, serials: tuple[int, ...]) -> None:
        """Forget microbatches of a peer that have ended."""
        if run in self._stages:
            self._stages[run].post(server_events.ReleasedBy(peer, serials))

    def take_invitation(self, peer: PeerId, run: RunId) -> None:
        """Pass on an invitation to send forwards."""
        self._owner.post(owner_events.Invited(peer, run))

    def take_statement(self, peer: PeerId, body: StepStatement) -> None:
        """Pass on a server's statement about the open exact step. Raises MalformedError."""
        self._owner.take_statement(peer, body)

    # Calls to peers; calls to ourselves need no network.

    def take_contradiction(self, body: wire.Contradiction) -> None:
        """Pass on results that contradict one. Raises PeerFault."""
        self._owner.take_contradiction(Contradiction.from_wire(body))

    async def keep_excluded(self) -> None:
        """Write the excluded keys, with the results that prove them guilty."""
        if self._contradictions is None:
            return
        async with self._saving:
            try:
                await asyncio.to_thread(self._contradictions.save, tuple(self.admitted.excluded.values()))
            except StorageError as error:
                logger.warning("a key is excluded only until this node restarts: %s", error)

    async def ask(self, peer: PeerId, task: Task) -> Answer:
        """Ask a server for a computation. Raises UnreachableError or PeerFault, as the other calls do."""
        if peer == self.directory.peer_id:
            return self.answer(task)
        return await self.calls.ask(peer, task)

    async def send_outcome(self, peer: PeerId, outcome: Outcome) -> None:
        """Send the owner of a task its outcome."""
        if peer == self.directory.peer_id:
            self.take_outcome(peer, outcome)
        else:
            await self.calls.tell(peer, outcome)

    async def send_release(self, peer: PeerId, run: RunId, serials: frozenset[int]) -> None:
        """Let a server forget microbatches that have ended."""
        if peer == self.directory.peer_id:
            self.release(peer, run, tuple(serials))
        else:
            await self.calls.release(peer, run, serials)

    async def send_invitation(self, peer: PeerId, run: RunId) -> None:
        """Invite an owner to send forwards again."""
        if peer == self.directory.peer_id:
            self.take_invitation(peer, run)
        else:
            await self.calls.invite(peer, run)


def count_microbatches(own: OwnerCounts, served: ServerCounts | None) -> dict[str, int]:
    """Return the counts of our own microbatches and of those that we serve, by result."""
    served = served or ServerCounts()
    counts: dict[str, int] = {word: getattr(own, word.replace(" ", "_")) for word in OWN_COUNTS}
    counts |= {f"dropped: {reason}": count for reason, count in own.dropped.items()}
    return counts | {f"served: {word}": getattr(served, word.replace(" ", "_")) for word in SERVED_COUNTS}


def _wall_ms() -> int:
    return int(time.time() * 1000)

"""Serve one stage of a pipeline, and send microbatches of this peer's text through all stages. PURE.

`handle` takes an event and the time and returns actions; `next_deadline` returns when to call it next. Two state
machines make the decisions, `protocol.pipeline.server` and `protocol.pipeline.owner`. The daemon, `murmur sim` and the
seeded tests all drive this loop.
"""

import random
from collections.abc import Iterable

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
    StagePeers,
    StatementReceived,
    TaskAsked,
    TokensDrawn,
    TrainerReady,
)
from node.loop.stage_modes import ExactMode, LocalMode
from protocol.identity import PeerId
from protocol.pipeline import owner_events, server_events
from protocol.pipeline.exact import StepAgreement, StepReports
from protocol.pipeline.ledger import Ledger
from protocol.pipeline.messages import Answer, HeldBlob, Task
from protocol.pipeline.microbatch import OwnerSettings
from protocol.pipeline.owner import Owner
from protocol.pipeline.routing import StagePeer
from protocol.pipeline.server import StageServer
from protocol.pipeline.stage import StageManifest, StageSettings, stage_run_ids

NOT_READY_MS = 500
EXACT_PAUSE = 0.1  # seconds; in exact steps a server is asked at its own round only
TOKEN_BYTES = 4  # int32


class StageLoop:
    """Handles events one by one. The first TrainerReady creates the server; each further one begins a new life.

    Args:
        first_serial: first serial of this process's microbatches; see `protocol.pipeline.messages.first_serial`.
        draws: whether this peer owns microbatches.
    """

    def __init__(
        self, settings: StageSettings, owner: Owner, mode: LocalMode, first_serial: int, *, draws: bool = True
    ) -> None:
        self.settings = settings
        self.owner = owner
        self.mode = mode
        self.server: StageServer | None = None
        self.round = self.life = 0
        self.is_resting = self.is_leaving = False
        self._me: PeerId = owner.settings.me
        self._draws = draws
        self._first_serial = self._next_serial = first_serial
        self._drawing: set[int] = set()  # serials that the trainer reads
        self._repeat_is_due = False  # the next contribution repeats the last; its ledger is taken already
        nobody: StagePeers = ((),) * settings.stages
        self._seen = PeersSeen(nobody, {}, StepReports(settings.stages))
        self._actions: list[StageAction] = []

    @property
    def is_drained(self) -> bool:
        """Whether a draining peer may leave: no peer waits for its work, and its own microbatches have ended."""
        return (self.server is None or self.server.is_idle) and not self.owner.open_serials

    def next_deadline(self) -> float | None:
        """Return when to handle DeadlinePassed; None while nothing depends on the time."""
        if self.is_leaving:
            return None
        times = [self.owner.next_deadline()]
        if self.server is not None:
            times += [self.server.next_deadline(), self.mode.next_deadline()]
        return min((time for time in times if time is not None), default=None)

    def handle(self, event: StageEvent, now: float) -> list[StageAction]:
        """Handle one event and return the resulting actions, to be carried out in this order."""
        match event:
            case TaskAsked(task):
                self._answer(task, now)
            case (
                owner_events.Answered()
                | owner_events.AskFailed()
                | owner_events.OutcomeReceived()
                | owner_events.Invited()
                | owner_events.ReleaseFailed()
                | owner_events.Probed()
            ):
                self._follow(self.owner.handle(event, now), now)
            case (
                server_events.InputsFetched()
                | server_events.InputMissing()
                | server_events.Stepped()
                | server_events.ReleasedBy()
                | server_events.CloseStep()
            ):
                self._serve(event, now)
            case server_events.Computed():
                self._serve(event, now)
                if self.server is not None:
                    self._actions.append(PublishRate(self.server.rate))
            case TrainerReady() | StageAnchorApplied() | StageContributed() | TokensDrawn():
                self._on_trainer(event, now)
            case _:
                self._on_surroundings(event, now)
        actions, self._actions = self._actions, []
        return actions

    def _on_surroundings(
        self, event: PeersSeen | StatementReceived | RestingChanged | Draining | Leaving | DeadlinePassed, now: float
    ) -> None:
        match event:
            case PeersSeen():
                self._seen = event
                self._use_peers(now)
            case StatementReceived(peer, statement):
                self.mode.record(peer, statement, now)
                self._settle(now)
                self._draw(now)
            case RestingChanged(is_resting):
                self.is_resting = is_resting
                self._draw(now)
            case Draining():
                self.is_resting = True
                self._serve(server_events.Drain(), now)
                self._follow(self.owner.leave(now), now)
            case Leaving():
                self.is_resting = self.is_leaving = True
                self._serve(server_events.Drain(), now)
            case DeadlinePassed():
                self._follow(self.owner.advance(now), now)
                if self.server is not None:
                    self._actions += self.server.advance(now)
                    self._settle(now)
                self._draw(now)

    # The trainer.

    def _on_trainer(
        self, event: TrainerReady | StageAnchorApplied | StageContributed | TokensDrawn, now: float
    ) -> None:
        match event:
            case TokensDrawn():
                self._begin(event, now)
                self._settle(now)
                return
            case TrainerReady():
                self.mode.on_trainer(event, self._drawing, now)
                self._on_ready(event, now)
            case StageAnchorApplied():
                self.mode.on_trainer(event, self._drawing, now)
                if self.mode.leaves_chain(event.round, self.round):
                    self._begin_life(event.wall_ms, Ledger(), Ledger(), now)
                self._set_round(event.round, now)
            case StageContributed():
                self.mode.on_trainer(event, self._drawing, now)
                if self.server is not None and not self._repeat_is_due:
                    self.server.steps.take_ledger()
                self._repeat_is_due = False
        self._settle(now)

    def _on_ready(self, event: TrainerReady, now: float) -> None:
        self.round, self._repeat_is_due = event.round, event.repeats
        self._drawing.clear()
        self._begin_life(event.wall_ms, event.ledger, event.contributed, now)
        self._use_peers(now)

    def _begin_life(self, wall_ms: int, ledger: Ledger, contributed: Ledger, now: float) -> None:
        """Void the earlier results of this stage, except those in the ledgers, and publish the new life."""
        self.life = max(self.life + 1, wall_ms)
        if self.server is None:
            self.server = self.mode.build_server(self.settings, self.life, self.round, now)
        self._serve(server_events.TrainerRestarted(self.life, ledger, contributed), now)
        if self.server.round != self.round:  # the trainer crashed between applying an anchor and reporting it
            self._set_round(self.round, now)
        self._actions.append(PublishLife(self.life, self.server.rate))

    def _set_round(self, number: int, now: float) -> None:
        self.mode.begin_round()
        self.round = number
        self._serve(server_events.RoundChanged(number), now)
        self._use_peers(now)
        if self.mode.ends_with_round:  # frees places for microbatches of the new round
            self._follow(self.owner.end_round(now), now)
        self.mode.freeze_sum(now)

    # The peers.

    def _use_peers(self, now: float) -> None:
        us = StagePeer(self._me, self.life, self.round)
        self.mode.set_peers(self._seen, us, self.is_resting)
        standing = None if self._seen.standing is None else self._seen.standing | {self._me}
        changed = owner_events.PeersChanged(self._routes(), self.round, standing)
        self._follow(self.owner.handle(changed, now), now)
        owners = {**self._seen.first_serials, self._me: self._first_serial}
        self._serve(server_events.OwnersChanged(owners, standing, self._me), now)
        self._draw(now)

    def _routes(self) -> StagePeers:
        """Return the servers for our own microbatches."""
        if not self._seen.serves_all:
            return self.mode.routes(self._seen.stages)
        return tuple(tuple(entry for entry in peers if entry.peer == self._me) for peers in self._seen.stages)

    # The owner.

    def _follow(self, actions: Iterable[owner_events.Action], now: float) -> None:
        """Forward the owner's actions; each microbatch that ended lets another one begin."""
        has_ended = False
        for action in actions:
            if not isinstance(action, owner_events.Finished):
                self._actions.append(action)
                continue
            has_ended = True
            self.mode.on_finished(action, now)
            self._actions.append(DropTokens(action.serial))
            if action.reason == "refused":
                self._actions.append(ReportRefused(action.serial))
        if has_ended:
            self._draw(now)

    def _draw(self, now: float) -> None:
        """Draw microbatches from the trainer, up to the in-flight limit."""
        room = self.owner.room - len(self._drawing)
        if self.server is None or self.is_resting or not self._draws or room <= 0:
            return
        for draw in self.mode.draws(room, now):
            serial, self._next_serial = self._next_serial, self._next_serial + 1
            self.mode.start_draw(serial, draw, now)
            self._drawing.add(serial)
            self._actions.append(DrawTokens(serial, draw.window))

    def _begin(self, event: TokensDrawn, now: float) -> None:
        self._drawing.discard(event.serial)
        if not self.mode.may_begin(event.serial, self.owner.room):
            self._actions.append(DropTokens(event.serial))  # its round is over
            return
        part = self.mode.part_of(event.serial, self.round)
        self._follow(self.owner.begin(event.serial, HeldBlob(event.blob, self._me), now, part), now)

    # The server.

    def _answer(self, task: Task, now: float) -> None:
        if self.server is None:
            self._actions.append(AnswerTask(Answer("busy", 0, self.round, retry_ms=NOT_READY_MS)))
            return
        answer, actions = self.server.ask(task, now)
        self._actions += [AnswerTask(answer), *actions]

    def _serve(self, event: server_events.Event, now: float) -> None:
        if self.server is not None:
            actions = self.server.handle(event, now)
            self._actions += actions
            for action in actions:
                if isinstance(action, server_events.TrainerEnded) and action.owner != self._me:
                    self.owner.distrust(action.owner, now)
            self._settle(now)

    def _settle(self, now: float) -> None:
        if self.server is not None:
            self._actions += self.mode.settle(self.server, now)


def build_stage_loop(manifest: StageManifest, me: PeerId, first: int, rng: random.Random, *, draws: bool) -> StageLoop:
    """Build the loop of a peer of a stage; `first` is the first serial of its process."""
    table, model = manifest.pipeline, manifest.model
    runs = stage_run_ids(manifest.whole_run_id, table.stages)
    settings = stage_settings(manifest)
    owner_settings = OwnerSettings(
        me,
        table.in_flight,
        needs_tokens=model.needs_tokens,
        activation_bytes=settings.activation_bytes,
        round_pause=EXACT_PAUSE if table.is_exact else 1.0,
        audit_share=table.audit_share,
    )
    mode = LocalMode()
    if table.is_exact:
        agreement = StepAgreement(me, runs, manifest.stage, settings.step_size)
        mode = ExactMode(agreement, manifest.stage, table.microbatch)
    return StageLoop(settings, Owner(owner_settings, runs, rng), mode, first, draws=draws)


def stage_settings(manifest: StageManifest) -> StageSettings:
    """Return the settings of the servers of a stage."""
    table, model = manifest.pipeline, manifest.model
    return StageSettings(
        run=manifest.run_id,
        stage=manifest.stage,
        stages=table.stages,
        activation_bytes=table.activation_bytes(model.context, model.stream_width),
        token_bytes=TOKEN_BYTES * table.microbatch * (model.context + 1),
        step_size=manifest.train.batch_tokens // (table.microbatch * model.context),
        memory=table.memory,
        needs_tokens=model.needs_tokens,
    )

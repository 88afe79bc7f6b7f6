"""Carry out the actions of the round loop in asyncio; their results come back as events."""

import asyncio

from node.daemon.inbox import Inbox, MessageReceiver
from node.daemon.peers.peer_rpc import Outbox
from node.daemon.round_effects import RoundEffects
from node.daemon.stages.stage_effects import StageEffects
from node.daemon.state_effects import StateEffects
from node.loop.actions import (
    AdoptState,
    AdvanceState,
    Answer,
    ApplyCommit,
    CloseRound,
    FetchBlob,
    FetchState,
    FindPath,
    LeaveRun,
    LoopAction,
    PrecomputeCommit,
    PublishHead,
    PublishStep,
    ReducePart,
    ReportCatchUp,
    ReportConduct,
    ReportMissed,
    ReportPace,
    ReportPhase,
    ReportRecovered,
    SaveProofs,
    SetResting,
    StartTrainer,
    TakeState,
    TargetReached,
)
from node.loop.events import LoopEvent, Started, Stopped, TimePassed
from node.loop.round_loop import RoundLoop
from node.loop.stage_events import StageEvent
from node.processes.workers import BackgroundTasks
from protocol.consensus.events import Rejected, RequestEarlySubmit, Send, VoteRecord


class Effects:
    """Passes each event of the inbox to the loop, runs the actions in order, and keeps the loop's timer."""

    def __init__(
        self, loop: RoundLoop, inbox: Inbox, receiver: MessageReceiver, outbox: Outbox, round_effects: RoundEffects,
        state_effects: StateEffects, stage: StageEffects | None = None,
    ) -> None:  # fmt: skip
        self._loop = loop
        self._inbox = inbox
        self._receiver = receiver
        self._outbox = outbox
        self._round = round_effects
        self._state = state_effects
        self._stage = stage
        self._tasks = BackgroundTasks(inbox)
        self._timer: asyncio.TimerHandle | None = None
        self.reached: TargetReached | None = None  # the end of the run
        inbox.attach(self)

    async def run(self) -> None:
        """Take part in the run until its target is reached. Raises an error in our own code."""
        self._inbox.post(Started())
        try:
            await self._inbox.wait_until_ended()
        finally:
            self._tasks.cancel_all()

    def stop(self) -> None:
        """Leave the run, but still answer peers that ask about decided rounds."""
        self._inbox.post(Stopped())
        self._tasks.cancel_all()

    def handle(self, event: LoopEvent | StageEvent) -> None:
        if isinstance(event, StageEvent):
            assert self._stage is not None
            self._stage.handle(event)
            return
        for action in self._loop.handle(event, _now()):
            self._run(action)
        self._set_timer()

    def _run(self, action: LoopAction) -> None:
        match action:
            case Send(peers, signed):
                self._outbox.send(peers, signed)
            case Answer():
                self._receiver.answer(action, self._outbox)
            case FetchBlob():
                self._round.fetch(action)
            case ReducePart():
                self._round.reduce(action)
            case VoteRecord():
                self._round.persist(action)
            case SaveProofs(proofs):
                self._round.save_proofs(proofs)
            case CloseRound():
                self._round.close_round()
            case _:
                self._run_on_state(action)

    def _run_on_state(self, action: LoopAction) -> None:
        match action:
            case PrecomputeCommit():
                self._state.precompute(action)
            case RequestEarlySubmit():
                self._tasks.spawn(self._state.request_early_submit())
            case StartTrainer():
                self._tasks.spawn(self._state.start_trainer())
            case ApplyCommit():
                self._tasks.spawn(self._state.apply_commit(action))
            case AdvanceState():
                self._tasks.spawn(self._state.advance_state(action))
            case PublishStep():
                self._state.publish_step(action)
            case PublishHead():
                self._tasks.spawn(self._state.publish_head(action))
            case FindPath():
                self._tasks.spawn(self._state.find_path(action))
            case FetchState():
                self._tasks.spawn(self._state.fetch_state(action))
            case TakeState():
                self._tasks.spawn(self._state.take_state(action))
            case AdoptState():
                self._state.begin_adoption(action)
                self._tasks.spawn(self._state.adopt_state(action))
            case SetResting(is_resting):
                self._tasks.spawn(self._state.set_resting(is_resting))
            case TargetReached():
                self.reached = action
                self._inbox.end()
            case LeaveRun(is_extended):
                self._inbox.leave(is_extended)
            case (
                ReportPhase()
                | ReportRecovered()
                | ReportMissed()
                | ReportPace()
                | ReportCatchUp()
                | ReportConduct()
                | Rejected()
            ):
                self._state.report(action)

    def _set_timer(self) -> None:
        deadline = self._loop.next_deadline(_now())
        if self._timer is not None:
            if self._timer.when() == deadline and not self._timer.cancelled():
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._inbox.post(TimePassed())


def _now() -> float:
    return asyncio.get_running_loop().time()

"""Connect a replica to its trainer, over any number of restarts: anchors go in, contributions come out.

The anchor of round r is in buffer r % 2 of the shared memory. The daemon writes it only once the trainer has applied
round r - 1, so a trainer never reads a buffer that changes meanwhile.

An outcome is sent in one ApplyAnchor only, to a trainer for which that contribution is outstanding. If it were sent
twice, the trainer would apply the second one to its next contribution. So the daemon sends nothing to a trainer between
its death and its Ready; the answer to Ready has everything.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from node.daemon.audits.work_keeper import WorkKeeper
from node.daemon.stages.stage_effects import StageEffects
from node.daemon.state.outer_state import OuterState, Rooms
from node.loop.contributions import (
    ContributionFile,
    ContributionTracker,
    ForkOutcome,
    LastSent,
    SettledContribution,
    StoredContribution,
    store_parts,
)
from node.monitoring.status import ErrorRecorder
from node.processes.workers import RunInThread
from node.step_settings import StepSettings
from node.trainer.ipc.channel import (
    AnchorApplied,
    ApplyAnchor,
    ContributionHeader,
    Evaluate,
    Evaluated,
    FromTrainer,
    PauseChanged,
    Ready,
    RevisedOutcome,
    RowsSkipped,
    SetResting,
    SubmitEarly,
    TrainerProgress,
    TrainerWarning,
)
from node.trainer.ipc.shared_memory import SharedMemory
from node.trainer.ipc.trainer_process import TrainerProcess
from node.trainer.vectors import TrainerVectors
from optim.method import Method
from protocol.blobs.store import BlobStore

APPLY_ANCHOR_SECONDS = 60.0
LAST_APPLY_ANCHOR_SECONDS = 5.0
MAX_EVALUATION_SHARE = 0.1  # of the trainer's time
EVALUATION_SECONDS = 60.0  # for the validation loss of the run's last round


class TrainerListener(Protocol):
    def on_trainer_message(self, message: FromTrainer) -> None:
        """Handle a message of the trainer; a new contribution is in the tracker already."""


class StepTargets(Protocol):
    def steps_for(self, round_number: int, /) -> int:
        """Return the number of inner steps for a round."""


@dataclass(frozen=True, kw_only=True)
class TrainerTools:
    """The trainer's process, and the places that its contributions are read from and stored in."""

    process: TrainerProcess
    shared_memory: SharedMemory
    store: BlobStore
    contribution_file: ContributionFile
    run_in_thread: RunInThread
    work_keeper: WorkKeeper | None = None
    stage: StageEffects | None = None
    vectors: TrainerVectors | None = None


class TrainerLink:
    """Sends anchors to the trainer of one replica and stores its contributions."""

    def __init__(
        self,
        tools: TrainerTools,
        contributions: ContributionTracker,
        step_targets: StepTargets,
        listener: TrainerListener,
        errors: ErrorRecorder,
    ) -> None:
        self._process = tools.process
        self._shared_memory = tools.shared_memory
        self._store = tools.store
        self._contribution_file = tools.contribution_file
        self._run_in_thread = tools.run_in_thread
        self._work_keeper = tools.work_keeper
        self._stage = tools.stage
        self._vectors = tools.vectors
        self.contributions = contributions
        self._step_targets = step_targets
        self._listener = listener
        self._errors = errors
        self._round = 0
        self._started = asyncio.Event()
        self._changed = asyncio.Condition()  # notified when one of the next two changes
        self._running = False
        self._applied_round = 0
        self._ready_crash_count = -1  # crash count when the trainer last sent Ready
        self._outstanding: int | None = None  # round of the contribution whose outcome the trainer waits for
        self._resent_round: int | None = None  # the same, if the trainer will send that contribution again
        # Earlier outcomes changed: until the trainer knows, it sends too much or too little, which is not submitted.
        self._revision_pending = bool(self._revised_outcomes())
        self._revision_sent = False
        self._has_switched = False  # to an anchor of another chain, which the trainer may not know by its round
        self._is_resting = False
        self._evaluates = True  # as the trainer said when it was ready
        self._pump: asyncio.Task[None] | None = None
        self._is_evaluating = False
        self.submit_lock = asyncio.Lock()  # held while the store has blobs that no contribution names yet

    @property
    def crash_count(self) -> int:
        return self._process.crash_count

    @property
    def not_running_reason(self) -> str:
        """Return why no trainer runs; empty if one does."""
        return self._process.not_running_reason

    @property
    def round(self) -> int:
        """Return the round of the anchor that was last written for the trainer."""
        return self._round

    async def start(
        self, round_number: int, shared: Sequence[Tensor], settings: StepSettings, exact_step: int = 0
    ) -> None:
        self._process.settings, self._process.exact_step = settings, exact_step
        self._round = self._process.round = self._applied_round = round_number
        self._shared_memory.write_anchor(round_number, shared)
        await self._process.start()
        self._running = True
        self._pump = asyncio.create_task(self._listen(), name="trainer link")
        self._started.set()

    async def wait_finished(self) -> None:
        """Wait until the trainer ends. Raises the error of one that cannot be restarted."""
        await self._started.wait()
        assert self._pump is not None
        await asyncio.shield(self._pump)

    async def stop(self, round_number: int, *, evaluates: bool = False) -> None:
        """Let the trainer apply that round and write a last snapshot, and stop it.

        `evaluates`: a requested validation loss is awaited, because that of the last round has nobody else to measure.
        """
        if not await self.wait_until_applied(round_number, LAST_APPLY_ANCHOR_SECONDS):
            self._errors.record_recovered(
                "trainer late", f"the trainer stops before it has applied round {round_number}"
            )
        if evaluates:
            await self._wait_until_evaluated()
        await self._process.stop()
        if self._pump is not None:
            await asyncio.wait({self._pump}, timeout=LAST_APPLY_ANCHOR_SECONDS)
        async with self._changed:
            self._running = False
            self._changed.notify_all()

    def record_fork(self, fork: ForkOutcome) -> None:
        """Record that earlier contributions have other outcomes on the chain that we switched to."""
        if fork.revised:
            self._revision_pending = True
            self._revision_sent = False

    async def set_resting(self, is_resting: bool) -> None:
        """Let the trainer rest, or train again; also one that is restarted."""
        self._is_resting = is_resting
        await self._process.send(SetResting(is_resting=is_resting))
        if self._stage is not None:
            self._stage.set_resting(is_resting)

    async def apply_anchor(
        self, round_number: int, shared: Sequence[Tensor], settings: StepSettings, exact_step: int = 0
    ) -> None:
        """Send the trainer a new anchor, with the outcome of its contribution if there is one.

        `settings` hold from that round on. `exact_step`: the step that the round makes, where steps are exact.
        """
        if not self._running:  # nobody reads the memory meanwhile, and `start` sends the anchor
            await self._run_in_thread(self._shared_memory.write_anchor, round_number, shared)
            self._round = round_number
            return
        is_written = False
        while not is_written:
            while not await self.wait_until_applied(self._round, APPLY_ANCHOR_SECONDS):  # a stuck trainer is restarted
                line = f"the trainer has not applied round {self._round} for {APPLY_ANCHOR_SECONDS:g} s"
                self._errors.record_recovered("trainer late", line)
            async with self._process.handing_over:
                is_written = self._has_applied(self._round)  # unless a loop has connected meanwhile
                if is_written:
                    await self._write_anchor(round_number, shared)
                    self._has_switched |= round_number <= self._round
                    self._round, self._process.settings = round_number, settings
                    self._process.round, self._process.exact_step = round_number, exact_step
        self.contributions.on_round(round_number)  # a contribution may have arrived during the copy
        # On another chain the round may be lower, and still not be applied.
        self._applied_round = min(self._applied_round, round_number - 1)
        if self._process.crash_count == self._ready_crash_count:
            await self._send_anchor()

    async def _write_anchor(self, round_number: int, shared: Sequence[Tensor]) -> None:
        """Write an anchor; a loop that was killed in the middle of a change needs the one that is overwritten."""
        if self._process.is_absent and self._vectors is not None:
            await self._run_in_thread(self._vectors.read)
        await self._run_in_thread(self._shared_memory.write_anchor, round_number, shared)

    def anchor_rooms(self, round_number: int, method: Method) -> Rooms:
        """Return the memory of the shared vectors of the next round by name.

        There is none while a trainer runs that has not applied the current round.
        """
        if self._running and (round_number != self._round + 1 or self._applied_round < self._round):
            return {}
        names = method.signal.shared_names
        return dict(zip(names, self._shared_memory.anchor_vectors(round_number, len(names)), strict=True))

    def share_memory(self, round_number: int, state: OuterState, method: Method) -> OuterState:
        """Return the state with its anchor in the shared memory, if it was written there for the trainer."""
        if self._round != round_number:
            return state
        names = method.signal.shared_names
        return state.in_memory(self._shared_memory.anchor_vectors(round_number, len(names)), method)

    async def wait_until_applied(self, round_number: int, seconds: float = APPLY_ANCHOR_SECONDS) -> bool:
        """Return whether the trainer applies a round in time, or does not run.

        Without a trainer the snapshot does not change, and the next one gets everything after its Ready.
        """
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(partial(self._has_applied, round_number))
        except TimeoutError:
            return False
        return True

    def _has_applied(self, round_number: int) -> bool:
        return self._applied_round >= round_number or not self._running or self._process.is_absent

    def affords_evaluation(self, applied: AnchorApplied, *, is_last: bool) -> bool:
        """Return whether the loss of an anchor may be measured: the run's last one, and others if it takes little time.

        One process on a CPU evaluates a billion parameters for many minutes, in which it makes no steps.
        """
        return self._evaluates and (is_last or applied.evaluation_share <= MAX_EVALUATION_SHARE)

    def expect_evaluation(self) -> None:
        """Note that the validation loss of the newest anchor is about to be requested."""
        self._is_evaluating = True

    async def request_evaluation(self) -> None:
        """Request the validation loss of the newest anchor; the answer goes to the listener."""
        await self._process.send(Evaluate(round=self._round))

    async def _wait_until_evaluated(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EVALUATION_SECONDS), self._changed:
                while self._is_evaluating and self._running:
                    await self._changed.wait()

    async def _on_pause(self) -> None:
        """Look again whether an own loop is absent, for which nobody waits."""
        async with self._changed:
            self._changed.notify_all()

    async def _on_evaluated(self) -> None:
        async with self._changed:
            self._is_evaluating = False
            self._changed.notify_all()

    async def request_early_submit(self) -> None:
        """Request the contribution to the current round before all its steps are made."""
        await self._process.send(SubmitEarly(round=self._round))
        if self._stage is not None:
            self._stage.close_step()

    async def _listen(self) -> None:
        async for message in self._process.messages():
            match message:
                case Ready():
                    await self._on_ready(message)
                case ContributionHeader():
                    await self._on_contribution(message)
                case AnchorApplied():
                    await self._on_anchor_applied(message.round)
                case Evaluated():
                    await self._on_evaluated()
                case PauseChanged():
                    await self._on_pause()
                case TrainerProgress() | TrainerWarning() | RowsSkipped():
                    pass
            if self._stage is not None:
                self._stage.on_trainer_message(message)
            self._listener.on_trainer_message(message)

    async def _on_ready(self, ready: Ready) -> None:
        """Update a trainer that (re)started and may have missed an anchor or an outcome."""
        self._ready_crash_count = self._process.crash_count
        self._evaluates = ready.evaluates
        await self._on_evaluated()  # a trainer that was restarted does not know of the request
        self._outstanding = ready.outstanding
        self._resent_round = ready.outstanding
        if self._is_resting:
            await self._process.send(SetResting(is_resting=True))
        if (
            ready.round != self._round
            or self._has_switched
            or self.contributions.outcome_of(ready.outstanding) != "none"
            or self._revised_outcomes()
        ):
            await self._send_anchor()
        else:
            await self._on_anchor_applied(ready.round)

    async def _send_anchor(self) -> None:
        outcome = self.contributions.outcome_of(self._outstanding)
        if outcome != "none":
            self._outstanding = None
        self._revision_sent = self._revision_pending
        await self._process.send(
            ApplyAnchor(
                round=self._round,
                outcome=outcome,
                steps=self._step_targets.steps_for(self._round),
                revised=self._revised_outcomes(),
                settings=self._process.settings,
                exact_step=self._process.exact_step,
                is_other_chain=self._has_switched,
            )
        )

    def _revised_outcomes(self) -> tuple[RevisedOutcome, ...]:
        return tuple(
            RevisedOutcome(
                header=entry.contribution.header,
                parts=tuple(blob.name for blob in entry.contribution.parts),
                outcome=entry.outcome,
            )
            for entry in self.contributions.settled
            if entry.previous_outcome is not None
        )

    async def _on_anchor_applied(self, round_number: int) -> None:
        if round_number == self._round:
            self._has_switched = False
            if self._revision_sent:
                self._revision_pending = self._revision_sent = False
        if round_number <= self._round:  # a higher one is of the chain that we left
            async with self._changed:
                self._applied_round = max(self._applied_round, round_number)
                self._changed.notify_all()

    async def _on_contribution(self, header: ContributionHeader) -> None:
        """Store the parts of a new contribution and make it pending."""
        repeated, self._resent_round = self._resent_round == header.round, None
        if repeated and self.contributions.is_known(header):
            return
        self._outstanding = header.round
        async with self.submit_lock:
            settled = None if self._revision_pending else tuple(self.contributions.settled)
            contribution = await self._run_in_thread(self._store_contribution, header, settled)
            if self._revision_pending:
                self._errors.record_recovered(
                    "sent again", f"the contribution of round {header.round} is of the chain that was left"
                )
                self.contributions.reject(contribution, self._round)
            else:
                self.contributions.submit(contribution, self._round)
        # Its round may be decided meanwhile, and the open one unable to include it.
        self.contributions.on_round(self._round)
        if self.contributions.pending is None and self._process.crash_count == self._ready_crash_count:
            await self._send_anchor()

    def _store_contribution(
        self, header: ContributionHeader, settled: tuple[SettledContribution, ...] | None
    ) -> StoredContribution:
        """Store a contribution; `settled` are those before it, or None if it will not be submitted."""
        parts = store_parts(self._store, self._shared_memory, header)
        work = None if self._work_keeper is None else self._work_keeper.record(header)
        contribution = StoredContribution(header, parts, work)
        if settled is not None:
            self._contribution_file.save(LastSent(contribution, settled))
        return contribution

"""Connect a replica to its trainer, over any number of restarts: anchors go in, contributions come out.

The anchor of round r is in buffer r % 2 of the shared memory. The daemon writes it only once the trainer has applied
round r - 1, so a trainer never reads a buffer that changes meanwhile.

An outcome is sent in one ApplyAnchor only, to a trainer for which that contribution is outstanding. If it were sent
twice, the trainer would apply the second one to its next contribution. So the daemon sends nothing to a trainer between
its death and its Ready; the answer to Ready has everything.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from node.daemon.state.contributions import ContributionIntake
from node.daemon.state.outer_state import OuterState, Rooms, TrainerAnchors
from node.loop.contributions import ForkOutcome
from node.monitoring.status import ErrorRecorder
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
from node.trainer.ipc.trainer_process import TrainerProcess

APPLY_ANCHOR_SECONDS = 60.0
LAST_APPLY_ANCHOR_SECONDS = 5.0
MAX_EVALUATION_SHARE = 0.1  # of the trainer's time
EVALUATION_SECONDS = 60.0  # for the validation loss of the run's last round


class TrainerLink:
    """Sends anchors to the trainer of one replica and receives its contributions.

    Args:
        process: the trainer's.
        anchors: the memory that it reads anchors from.
        intake: stores and tracks its contributions.
        steps_for: returns the number of inner steps for a round.
        on_message: gets every message of the trainer; a new contribution is in the tracker already.
        errors: counts and logs what goes wrong.
    """

    def __init__(
        self, process: TrainerProcess, anchors: TrainerAnchors, intake: ContributionIntake,
        steps_for: Callable[[int], int], on_message: Callable[[FromTrainer], None], errors: ErrorRecorder,
    ) -> None:  # fmt: skip
        self.process = process
        self.intake = intake
        self._anchors = anchors
        self._steps_for = steps_for
        self._on_message = on_message
        self._errors = errors
        self.round = 0  # of the anchor that was last written for the trainer
        self._base = b""  # digest of the chain of that anchor; empty for the first one
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

    async def start(
        self, round_number: int, shared: Sequence[Tensor], settings: StepSettings, exact_step: int = 0
    ) -> None:
        self.process.settings, self.process.exact_step = settings, exact_step
        self.round = self.process.round = self._applied_round = round_number
        self._anchors.write(round_number, shared)
        await self.process.start()
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
        await self.process.stop()
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
        await self.process.send(SetResting(is_resting=is_resting))

    async def apply_anchor(
        self,
        round_number: int,
        shared: Sequence[Tensor],
        settings: StepSettings,
        exact_step: int = 0,
        base: bytes = b"",
    ) -> None:
        """Send the trainer a new anchor, with the outcome of its contribution if there is one.

        `settings` hold from that round on. `exact_step`: the step that the round makes, where steps are exact.
        `base`: the digest of the chain of the anchor.
        """
        if not self._running:  # nobody reads the memory meanwhile, and `start` sends the anchor
            await self._anchors.write_in_thread(round_number, shared)
            self.round = round_number
            return
        is_written = False
        while not is_written:
            while not await self.wait_until_applied(self.round, APPLY_ANCHOR_SECONDS):  # a stuck trainer is restarted
                line = f"the trainer has not applied round {self.round} for {APPLY_ANCHOR_SECONDS:g} s"
                self._errors.record_recovered("trainer late", line)
            async with self.process.handing_over:
                is_written = self._has_applied(self.round)  # unless a loop has connected meanwhile
                if is_written:
                    await self._write_anchor(round_number, shared)
                    self._has_switched |= round_number <= self.round
                    self.round, self.process.settings = round_number, settings
                    self.process.round, self.process.exact_step = round_number, exact_step
                    self._base = base
        self.intake.tracker.on_round(round_number)  # a contribution may have arrived during the copy
        # On another chain the round may be lower, and still not be applied.
        self._applied_round = min(self._applied_round, round_number - 1)
        if self.process.crash_count == self._ready_crash_count:
            await self._send_anchor()

    async def _write_anchor(self, round_number: int, shared: Sequence[Tensor]) -> None:
        """Write an anchor; a loop that was killed in the middle of a change needs the one that is overwritten."""
        if self.process.is_absent:
            await self._anchors.finish_change()
        await self._anchors.write_in_thread(round_number, shared)

    def anchor_rooms(self, round_number: int) -> Rooms:
        """Return the memory of the shared vectors of the next round by name.

        There is none while a trainer runs that has not applied the current round.
        """
        if self._running and (round_number != self.round + 1 or self._applied_round < self.round):
            return {}
        return self._anchors.rooms(round_number)

    def share_memory(self, round_number: int, state: OuterState) -> OuterState:
        """Return the state with its anchor in the shared memory, if it was written there for the trainer."""
        return self._anchors.place(round_number, state) if self.round == round_number else state

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
        return self._applied_round >= round_number or not self._running or self.process.is_absent

    def affords_evaluation(self, applied: AnchorApplied, *, is_last: bool) -> bool:
        """Return whether the loss of an anchor may be measured: the run's last one, and others if it takes little time.

        One process on a CPU evaluates a billion parameters for many minutes, in which it makes no steps.
        """
        return self._evaluates and (is_last or applied.evaluation_share <= MAX_EVALUATION_SHARE)

    def expect_evaluation(self) -> None:
        """Note that the validation loss of the newest anchor is about to be requested."""
        self._is_evaluating = True

    async def request_evaluation(self) -> None:
        """Request the validation loss of the newest anchor; the answer comes as a message."""
        await self.process.send(Evaluate(round=self.round))

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
        await self.process.send(SubmitEarly(round=self.round))

    async def _listen(self) -> None:
        async for message in self.process.messages():
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
            self._on_message(message)

    async def _on_ready(self, ready: Ready) -> None:
        """Update a trainer that (re)started and may have missed an anchor or an outcome."""
        self._ready_crash_count = self.process.crash_count
        self._evaluates = ready.evaluates
        await self._on_evaluated()  # a trainer that was restarted does not know of the request
        self._outstanding = ready.outstanding
        self._resent_round = ready.outstanding
        if self._is_resting:
            await self.process.send(SetResting(is_resting=True))
        if (
            ready.round != self.round
            or self._has_switched
            or self.intake.tracker.outcome_of(ready.outstanding) != "none"
            or self._revised_outcomes()
        ):
            await self._send_anchor()
        else:
            await self._on_anchor_applied(ready.round)

    async def _send_anchor(self) -> None:
        outcome = self.intake.tracker.outcome_of(self._outstanding)
        if outcome != "none":
            self._outstanding = None
        self._revision_sent = self._revision_pending
        await self.process.send(
            ApplyAnchor(
                round=self.round,
                outcome=outcome,
                steps=self._steps_for(self.round),
                revised=self._revised_outcomes(),
                settings=self.process.settings,
                exact_step=self.process.exact_step,
                base=self._base.hex(),
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
            for entry in self.intake.tracker.settled
            if entry.previous_outcome is not None
        )

    async def _on_anchor_applied(self, round_number: int) -> None:
        if round_number == self.round:
            self._has_switched = False
            if self._revision_sent:
                self._revision_pending = self._revision_sent = False
        if round_number <= self.round:  # a higher one is of the chain that we left
            async with self._changed:
                self._applied_round = max(self._applied_round, round_number)
                self._changed.notify_all()

    async def _on_contribution(self, header: ContributionHeader) -> None:
        """Store the parts of a new contribution and make it pending."""
        repeated, self._resent_round = self._resent_round == header.round, None
        if repeated and self.intake.tracker.is_known(header):
            return
        self._outstanding = header.round
        tracker = self.intake.tracker
        async with self.intake.lock:
            settled = None if self._revision_pending else tuple(tracker.settled)
            contribution = await self.intake.store(header, settled)
            if self._revision_pending:
                self._errors.record_recovered(
                    "sent again", f"the contribution of round {header.round} is of the chain that was left"
                )
                tracker.reject(contribution, self.round)
            else:
                tracker.submit(contribution, self.round)
        # Its round may be decided meanwhile, and the open one unable to include it.
        self.intake.tracker.on_round(self.round)
        if self.intake.tracker.pending is None and self.process.crash_count == self._ready_crash_count:
            await self._send_anchor()

"""Exchange with the daemon between two inner steps: its messages, contributions, new anchors and snapshots.

node.trainer.schedule decides when. The state is in shared memory, of our own models on a CPU after each step; otherwise
the loop copies it there every SNAPSHOT_SECONDS, and at each contribution and each new anchor before it reports them. So
everything that the daemon has heard of survives a crash of this process.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from node.trainer.counters import StepTotals
from node.trainer.inner_step import ValidationLoss
from node.trainer.ipc.channel import (
    Activity,
    AnchorApplied,
    ApplyAnchor,
    ContributionHeader,
    Evaluate,
    Evaluated,
    Ready,
    RevisedOutcome,
    SetResting,
    Snapshotted,
    Stop,
    Stopped,
    SubmitEarly,
    TakeSnapshot,
    ToTrainer,
    TrainerChannel,
    TrainerConfig,
    TrainerProgress,
    TrainerWarning,
)
from node.trainer.ipc.shared_memory import SharedMemory
from node.trainer.schedule import (
    ContributionTimer,
    StepTarget,
    is_contribution_due,
    may_apply_anchor,
    merge_pending,
    must_wait,
)
from node.trainer.state import TrainerState
from protocol.audits import Conditions
from protocol.blobs.blob import Blob
from protocol.errors import MalformedError

SNAPSHOT_SECONDS = 10.0
LATE_SNAPSHOTS = 3
PROGRESS_SECONDS = 1.0
WAIT_SECONDS = 1.0
MAX_ANCHOR_WAIT_SECONDS = 5.0  # in mid-step; the gradients of a stage that it interrupts count in the step all the same


class ActivityTimer:
    """Seconds spent on each activity, including those of earlier processes."""

    def __init__(self, seconds: Mapping[Activity, float], clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds: dict[Activity, float] = dict(seconds)
        self._clock = clock

    @contextmanager
    def measure(self, activity: Activity) -> Iterator[None]:
        """Add the time inside the context to `activity`."""
        start = self._clock()
        try:
            yield
        finally:
            self.seconds[activity] = self.seconds.get(activity, 0.0) + self._clock() - start

    def share(self, activity: Activity) -> float:
        """Return the share of all seconds that an activity has taken, from 0 to 1."""
        total = sum(self.seconds.values())
        return self.seconds.get(activity, 0.0) / total if total else 0.0


class ExchangeLoop(ABC):
    """Takes part in the rounds with the weights of `state`; subclasses make the steps."""

    def __init__(
        self, config: TrainerConfig, state: TrainerState, shared_memory: SharedMemory, channel: TrainerChannel
    ) -> None:
        self._config = config
        self._state = state
        self._shared_memory = shared_memory
        self._channel = channel
        if not state.restore():
            state.start(config.round, config.exact_step)
        elif state.counters.round != config.round:  # its next steps have the settings of the other round
            state.update(obstacle="restarted between rounds")
        self._timer = ActivityTimer(state.counters.seconds)
        self._unreported = StepTotals()
        self._reported_at = self._saved_at = time.monotonic()
        self._pending_anchor: ApplyAnchor | None = None
        self._adopting: ApplyAnchor | None = None  # that a thread applies
        self._anchor_since = 0.0
        self._step_target = StepTarget()
        self._contribution_timer = ContributionTimer()
        self._is_resting = False  # while the organiser has paused the run
        self._is_stopping = False
        self._encoding = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encoding")

    @property
    @abstractmethod
    def device(self) -> str:
        """Return the name of the device, for people."""

    @property
    def ranks(self) -> int:
        """Return the number of devices that train together."""
        return 1

    @property
    def conditions(self) -> Conditions:
        """Return what an auditor needs to know of our steps."""
        return Conditions()

    @property
    def evaluates(self) -> bool:
        """Return whether this trainer can measure the validation loss."""
        return True

    @property
    def is_between_steps(self) -> bool:
        """Return whether no step has begun."""
        return True

    @property
    def encodes_aside(self) -> bool:
        """Return whether the processor is free to encode a contribution while the next steps are made."""
        return False

    @property
    def adopts_aside(self) -> bool:
        """Return whether it is free to apply an anchor meanwhile, and nobody repeats the steps to the bit."""
        return False

    @property
    def gradient_norm(self) -> float:
        """Return the norm of the newest step's gradient before clipping; 0 if it is unknown."""
        return 0.0

    @abstractmethod
    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step."""

    @abstractmethod
    def validate(self, round_number: int) -> ValidationLoss:
        """Measure the validation loss of the anchor of a round."""

    def make_contribution(self) -> ContributionHeader:
        """Make a contribution of the progress since the last one."""
        return self._state.make_contribution()

    def on_anchor(self, command: ApplyAnchor) -> None:  # noqa: B027  # most loops have nothing to change
        """Take note of an anchor that was applied, and of the organiser's settings, which hold from it on."""

    def reason_to_wait(self) -> Activity | None:
        """Return why no step may begin now, apart from the rounds; `None` if it may."""
        return "pause" if self._is_resting else None

    def handle_other(self, command: ToTrainer) -> None:
        """Handle a message that is not about rounds."""
        raise MalformedError(f"the daemon sent {command.kind!r} in the middle of training")

    def report(self) -> None:  # noqa: B027  # most loops have nothing to add
        """Send what the daemon should know besides the progress."""

    def open(self) -> None:
        """Tell the daemon that the trainer is ready."""
        self.report()
        counters = self._state.counters
        outstanding = counters.outstanding
        self._channel.send(
            Ready(
                device=self.device,
                device_kind=self.conditions.kind,
                ranks=self.ranks,
                step=counters.step,
                round=counters.round,
                outstanding=outstanding.round if outstanding else None,
                ledger=self._state.ledger.to_text(),
                contributed=self._state.contributed.to_text(),
                exact_step=counters.exact_step,
                evaluates=self.evaluates,
                start=self._config.start,
                learned=counters.learned,
            )
        )
        if outstanding:
            self._send_header(outstanding.to_header())

    def prepare_step(self) -> bool:
        """Do what the rounds ask for until a step may be made; returns False once the daemon has sent Stop."""
        while True:
            self._shared_memory.record_heartbeat()
            self.poll_commands()
            if self._is_stopping:
                return False
            if self._is_draft_due():
                self._finish_draft()
            if self._is_adoption_due():
                self._finish_adoption()
            counters, plan = self._state.counters, self._state.plan
            # A step may wait for the anchor; or for microbatches that wait for this peer to arrive at the newer round.
            is_late = time.monotonic() - self._anchor_since > MAX_ANCHOR_WAIT_SECONDS
            may_adopt = self.is_between_steps or is_late or must_wait(counters, plan)
            reason = self.reason_to_wait()
            if self._pending_anchor is not None and may_adopt and may_apply_anchor(counters, plan):
                self._begin_or_apply(self._pending_anchor)
            elif self.is_between_steps and self._is_contribution_due():
                self._send_contribution()
            elif reason == "pause":
                self._wait(reason)
            elif must_wait(counters, plan):
                self._wait("wait")
            elif reason is not None:
                self._wait(reason)
            else:
                return True

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def poll_commands(self) -> None:
        """Handle the next message of the daemon, if there is one."""
        self._handle_command(self._channel.receive())

    def report_step(self, tokens: int, loss: float) -> None:
        """Add a step that is counted to the next report of progress."""
        self._unreported += StepTotals(tokens=tokens, steps=1, loss=loss)

    def report_and_save(self) -> None:
        """Send the progress and save a snapshot, if it is time."""
        now = time.monotonic()
        if now - self._reported_at >= PROGRESS_SECONDS:
            self._send_progress()
        patience = LATE_SNAPSHOTS if self._shared_memory.is_held else 1  # it would wait for the checkpoint
        if now - self._saved_at >= patience * SNAPSHOT_SECONDS:
            self._save()

    def _is_contribution_due(self) -> bool:
        counters, plan = self._state.counters, self._state.plan
        if self._state.draft_steps is not None or self._adopting is not None:
            return False
        seconds = self._contribution_timer.seconds(counters.since_message.steps, counters.step, time.monotonic())
        steps = self._step_target.steps_due(plan.steps, counters.round)
        is_due = is_contribution_due(counters, steps, plan.method.schedule, seconds)
        # While a checkpoint is written, a draft would wait; better to make more steps for it.
        may_wait = counters.since_message.steps < min(steps, plan.steps) + plan.method.schedule.ahead
        return is_due and not (self._drafts and self._shared_memory.is_held and may_wait)

    @property
    def _drafts(self) -> bool:
        return self.encodes_aside and self._state.can_draft

    def _handle_command(self, command: ToTrainer | None) -> None:
        match command:
            case None:
                return
            case ApplyAnchor():
                if self._pending_anchor is None:
                    self._anchor_since = time.monotonic()
                self._pending_anchor = merge_pending(self._pending_anchor, command)
                self._step_target.set(command.round, command.steps)
            case SetResting():
                self._is_resting = command.is_resting
            case SubmitEarly():
                self._step_target.set(command.round, 1)
            case Evaluate():
                self._evaluate(command.round)
            case TakeSnapshot():
                self._save()
                self._channel.send(Snapshotted(step=self._state.counters.step))
            case Stop():
                if self._pending_anchor is not None:
                    self._apply_anchor(self._pending_anchor)
                self._save()
                self._is_stopping = True
                self._channel.send(Stopped())
            case _:
                self.handle_other(command)

    def _send_contribution(self) -> None:
        if self._drafts:
            with self._timer.measure("encode"):
                self._state.draft_contribution(self._encoding)
            return
        with self._timer.measure("encode"):
            header = self.make_contribution()
        self._save()
        self._send_progress()
        self._send_header(header)

    def _is_draft_due(self) -> bool:
        """Return whether a draft is encoded, or has to be waited for because no further step may be made."""
        steps, plan = self._state.draft_steps, self._state.plan
        is_needed = self._pending_anchor is not None or self._is_resting
        return steps is not None and (self._state.is_draft_encoded or is_needed or steps >= plan.method.schedule.ahead)

    def _finish_draft(self) -> None:
        """Send the contribution that was drafted, if there is one."""
        if self._state.draft_steps is None:
            return
        with self._timer.measure("encode"):
            header = self.make_contribution()
        self._send_progress()
        self._send_header(header)

    def _send_header(self, header: ContributionHeader) -> None:
        self._channel.send(header.model_copy(update={"conditions": self.conditions}))

    def _begin_or_apply(self, command: ApplyAnchor) -> None:
        """Let a thread apply an anchor if steps may go on meanwhile, otherwise apply it now."""
        is_plain = not command.revised and not command.is_other_chain and not command.exact_step
        if not (self.adopts_aside and self._state.can_adopt_beside and is_plain):
            self._apply_anchor(command)
            return
        self._finish_draft()
        self._pending_anchor, self._adopting = None, command
        self._state.begin_adoption(self._encoding, command.round, command.outcome)

    def _is_adoption_due(self) -> bool:
        """Return whether an anchor is applied, or has to be waited for because no further step may be made."""
        is_needed = self._pending_anchor is not None or self._is_resting
        return self._adopting is not None and (
            self._state.is_adopted or is_needed or must_wait(self._state.counters, self._state.plan)
        )

    def _finish_adoption(self) -> None:
        """Move to the anchor that a thread has applied, if there is one."""
        command, self._adopting = self._adopting, None
        if command is None:
            return
        with self._timer.measure("adopt"):
            self._state.finish_adoption()
            self.on_anchor(command)
        self._report_applied(command)

    def _apply_anchor(self, command: ApplyAnchor) -> None:
        self._finish_adoption()
        self._finish_draft()
        self._pending_anchor = None
        with self._timer.measure("adopt"):
            self._state.apply_anchor(
                command.round, command.outcome, command.exact_step, is_other_chain=command.is_other_chain
            )
            self.on_anchor(command)
            for entry in command.revised:
                if not self._state.revise_outcome(entry.header, entry.outcome, partial(self._read_payloads, entry)):
                    line = f"dropped all unsent work with the contribution of round {entry.header.round}"
                    self._channel.send(TrainerWarning(reason="work dropped", line=line))
        self._save()
        self._report_applied(command)

    def _report_applied(self, command: ApplyAnchor) -> None:
        share = self._timer.share("evaluate")
        self._channel.send(
            AnchorApplied(round=command.round, exact_step=command.exact_step, base=command.base, evaluation_share=share)
        )

    def _read_payloads(self, revised: RevisedOutcome) -> list[bytes]:
        """Read all parts of a contribution; returns none if one of them is missing or damaged."""
        folder = Path(self._config.blobs)
        try:
            payloads = [(folder / name).read_bytes() for name in revised.parts]
        except OSError as error:
            line = f"cannot read an earlier contribution: {error}"
            self._channel.send(TrainerWarning(reason="contribution missing", line=line))
            return []
        is_intact = all(Blob.of(data).name == name for data, name in zip(payloads, revised.parts, strict=True))
        return payloads if is_intact else []

    def _wait(self, activity: Activity) -> None:
        with self._timer.measure(activity):
            command = self._channel.receive(WAIT_SECONDS)
        self._handle_command(command)

    def _send_progress(self) -> None:
        self.report()
        now, work = time.monotonic(), self._unreported
        if not work.steps:
            return
        speed = work.tokens / max(1e-9, now - self._reported_at)
        counters = self._state.counters
        self._channel.send(
            self.add_measurements(
                TrainerProgress(
                    step=counters.step,
                    tokens=counters.tokens,
                    loss=work.mean_loss,
                    tokens_per_second=speed,
                    seconds=self._timer.seconds,
                    learning_rate=self.learning_rate(counters.step - 1),
                    gradient_norm=self.gradient_norm,
                )
            )
        )
        self._unreported = StepTotals()
        self._reported_at = now

    def add_measurements(self, progress: TrainerProgress) -> TrainerProgress:
        """Return the progress, to which a subclass adds its own measurements."""
        return progress

    def _save(self) -> None:
        self._finish_adoption()
        self._finish_draft()
        with self._timer.measure("snapshot"):
            self._state.update(seconds=dict(self._timer.seconds))
            self._state.save()
        self._saved_at = time.monotonic()

    def _evaluate(self, round_number: int) -> None:
        with self._timer.measure("evaluate"):
            found = self.validate(round_number)
        self._channel.send(
            Evaluated(round=round_number, loss=found.loss, tokens=found.tokens, by_source=dict(found.by_source))
        )

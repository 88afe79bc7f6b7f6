"""The trainer's loop: inner steps, contributions and new anchors. node.trainer.schedule decides when.

The loop saves a snapshot in shared memory every SNAPSHOT_SECONDS, and at each contribution and each new anchor before
it reports them. So everything that the daemon has heard of survives a crash of this process.
"""

import math
import time
from functools import partial
from pathlib import Path

from torch import Tensor

from node.data import BatchReader, Corpus, name_text_faults, open_source, validation_batches
from node.ipc.activation_memory import ActivationMemory
from node.ipc.channel import (
    Activity,
    AnchorApplied,
    ApplyAnchor,
    ContributionHeader,
    Evaluate,
    Evaluated,
    PauseChanged,
    Ready,
    RevisedOutcome,
    RowsSkipped,
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
from node.ipc.shared_memory import SharedMemory
from node.ipc.stage_messages import ComputeStage, DrawMicrobatch, StageStepped, TakeStageStep
from node.model import build_model, cut_of
from node.model.memory_estimate import fit_microbatch
from node.trainer.activity_timer import ActivityTimer
from node.trainer.counters import StepTotals
from node.trainer.device import (
    choose_device,
    device_class,
    device_name,
    is_out_of_memory,
    limit_memory,
    measure_device_use,
)
from node.trainer.inner_step import InnerOptimizer, accumulate_gradient, validation_loss
from node.trainer.pause_when_busy import PausePolicy, usage_meter_for
from node.trainer.schedule import ContributionTimer, StepTarget, is_contribution_due, may_apply_anchor, must_wait
from node.trainer.stage_work import StageWork, stage_train
from node.trainer.state import TrainerState
from optim.exchange import ContributionEncoder
from optim.round_plan import RoundPlanner
from protocol.audits.work import Conditions
from protocol.blobs.blob import Blob
from protocol.errors import MalformedError, MurmurError
from protocol.manifest import Manifest, TrainSection

SNAPSHOT_SECONDS = 10.0
PROGRESS_SECONDS = 1.0
WAIT_SECONDS = 1.0
MAX_ANCHOR_WAIT_SECONDS = 5.0  # in mid-step; the gradients of a stage that it interrupts count in the step all the same
USAGE_SECONDS = 2.0  # between two measurements of other programs' use
MAX_SKIPPED_STEPS_IN_A_ROW = 20


class Trainer:
    """One model, or one stage of it, in training. Manifest and program are those of `config`.

    `activations` is the memory in which a stage finds its inputs; a trainer of the whole model has none.
    """

    def __init__(
        self,
        config: TrainerConfig,
        manifest: Manifest,
        program: RoundPlanner,
        shared_memory: SharedMemory,
        channel: TrainerChannel,
        activations: ActivationMemory | None = None,
    ) -> None:
        self._config = config
        self._manifest = manifest
        self._shared_memory = shared_memory
        self._channel = channel
        self._device = choose_device(config.options.device)
        self._microbatch = fit_microbatch(manifest, config.options.memory, self._device.type)
        limit_memory(config.options.memory, self._device)
        self._meter = usage_meter_for(self._device) if config.options.pause_when_busy else None
        self._pause_policy = PausePolicy(self._meter.pause_share, self._meter.resume_share) if self._meter else None
        self._measured_at = -math.inf
        self._model = build_model(manifest.model, self._device, cut_of(manifest))
        train = self._settings_of(config.train or manifest.train)
        self._optimizer = InnerOptimizer(self._model, train, program.method.inner)
        if self._device.type == "cuda":
            self._pin_shared_memory()
        self._state = TrainerState(self._model, self._optimizer, program, ContributionEncoder(program), shared_memory)
        with name_text_faults(manifest.data):
            self._corpus = _open_corpus(manifest, Path(config.base))
            self._validation = validation_batches(self._corpus, manifest.model.context, config.validation_tokens)
        if not self._state.restore():
            self._state.start(config.round)
        counters = self._state.counters
        with name_text_faults(manifest.data):
            self._batches = BatchReader(
                self._corpus, manifest.model.context, manifest.run.seed, config.peer_id, counters.position
            )
        self._stage = StageWork(manifest, self._model, activations, self._batches) if activations else None
        self._text = self._corpus.fingerprint(manifest.model.context) if manifest.audits.share else ""
        self._timer = ActivityTimer(counters.seconds)
        self._skipped_in_a_row = 0
        self._gradient_norm = 0.0  # of the newest step
        self._unreported = StepTotals()
        self._reported_at = time.monotonic()
        self._saved_at = time.monotonic()
        self._pending_anchor: ApplyAnchor | None = None
        self._anchor_since = 0.0
        self._step_target = StepTarget()
        self._contribution_timer = ContributionTimer()
        self._is_resting = False  # while the organiser has paused the run
        self._stopping = False

    def _pin_shared_memory(self) -> None:
        self._shared_memory.pin()
        if not self._shared_memory.is_pinned:
            line = "the system does not lock the shared memory: contributions and snapshots take longer"
            self._channel.send(TrainerWarning(reason="memory not pinned", line=line))

    def _settings_of(self, train: TrainSection) -> TrainSection:
        stages = self._manifest.pipeline.stages
        return stage_train(train, stages) if stages > 1 else train

    def run(self) -> None:
        """Train until the daemon sends Stop."""
        self._send_skipped_rows()
        self._send_ready()
        while True:
            self._shared_memory.record_heartbeat()
            if self._stage is None or not self._stage.is_step_due:
                self._handle_command(self._channel.receive())
            if self._stopping:
                return
            self._update_pause()
            counters, plan = self._state.counters, self._state.plan
            is_between_steps = self._stage is None or self._stage.is_between_steps
            # A step may wait for the anchor; or for microbatches that wait for this peer to arrive at the newer round.
            is_late = time.monotonic() - self._anchor_since > MAX_ANCHOR_WAIT_SECONDS
            may_adopt = is_between_steps or is_late or must_wait(counters, plan)
            if self._pending_anchor is not None and may_adopt and may_apply_anchor(counters, plan):
                self._apply_anchor(self._pending_anchor)
            elif is_between_steps and self._is_contribution_due():
                self._send_contribution()
            elif self._is_resting or (self._pause_policy is not None and self._pause_policy.paused):
                self._wait("pause")
            elif must_wait(counters, plan):
                self._wait("wait")
            elif self._stage is not None and not self._stage.is_step_due:
                self._wait("idle")
            else:
                self._take_step()
                self._report_and_save()

    def _is_contribution_due(self) -> bool:
        counters, plan = self._state.counters, self._state.plan
        seconds = self._contribution_timer.seconds(counters.since_message.steps, time.monotonic())
        return is_contribution_due(
            counters, self._step_target.steps_due(plan.steps, counters.round), plan.method.schedule, seconds
        )

    def _send_ready(self) -> None:
        counters = self._state.counters
        outstanding = counters.outstanding
        self._channel.send(
            Ready(
                device=device_name(self._device),
                step=counters.step,
                round=counters.round,
                outstanding=outstanding.round if outstanding else None,
            )
        )
        if outstanding:
            self._send_header(outstanding.to_header())

    def _handle_command(self, command: ToTrainer | None) -> None:
        match command:
            case None:
                return
            case ApplyAnchor():
                if self._pending_anchor is None:
                    self._anchor_since = time.monotonic()
                self._pending_anchor = _merge_pending(self._pending_anchor, command)
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
            case DrawMicrobatch() | ComputeStage() | TakeStageStep() if self._stage is not None:
                self._serve_stage(self._stage, command)
            case Stop():
                if self._pending_anchor is not None:
                    self._apply_anchor(self._pending_anchor)
                self._save()
                self._stopping = True
                self._channel.send(Stopped())
            case _:
                raise MalformedError(f"the daemon sent {command.kind!r} in the middle of training")

    def _serve_stage(self, stage: StageWork, command: DrawMicrobatch | ComputeStage | TakeStageStep) -> None:
        """Do what the daemon says, in the order of its messages; the loop makes the step as soon as it may."""
        match command:
            case DrawMicrobatch():
                with name_text_faults(self._manifest.data):
                    self._channel.send(stage.draw(command))
                self._state.update(position=self._batches.position)
            case ComputeStage():
                with self._timer.measure("compute"):
                    computed = stage.compute(command)
                self._channel.send(computed)
            case TakeStageStep():
                stage.is_step_due = True
                self._channel.send(StageStepped())

    def _send_contribution(self) -> None:
        with self._timer.measure("encode"):
            header = self._state.make_contribution()
        self._save()
        self._send_progress()
        self._send_header(header)

    def _send_header(self, header: ContributionHeader) -> None:
        conditions = Conditions(
            device=device_class(self._device),
            text=self._text,
            threads=self._config.options.thread_count,
            microbatch=self._microbatch,
        )
        self._channel.send(header.model_copy(update={"conditions": conditions}))

    def _apply_anchor(self, command: ApplyAnchor) -> None:
        self._pending_anchor = None
        with self._timer.measure("adopt"):
            self._state.apply_anchor(command.round, command.outcome)
            if command.train is not None:
                self._optimizer.train = self._settings_of(command.train)
            for entry in command.revised:
                if not self._state.revise_outcome(entry.header, entry.outcome, partial(self._read_payloads, entry)):
                    line = f"dropped all unsent work with the contribution of round {entry.header.round}"
                    self._channel.send(TrainerWarning(reason="work dropped", line=line))
        self._save()
        self._channel.send(AnchorApplied(round=command.round))

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

    def _update_pause(self) -> None:
        """Pause or resume as other programs use the device, and report it."""
        now = time.monotonic()
        if self._meter is None or self._pause_policy is None or now - self._measured_at < USAGE_SECONDS:
            return
        self._measured_at, share = now, self._meter.measure_share()
        if share is not None and self._pause_policy.update(share, now):
            reason = f"others use {share:.0%} {self._meter.description}" if self._pause_policy.paused else ""
            self._channel.send(PauseChanged(reason=reason))

    def _wait(self, activity: Activity) -> None:
        with self._timer.measure(activity):
            command = self._channel.receive(WAIT_SECONDS)
        self._handle_command(command)

    def _take_step(self) -> None:
        """Make one inner step; skip it if the loss or the gradient is not finite."""
        with self._timer.measure("compute"):
            step = self._state.counters.step
            tokens, loss = self._stage.take() if self._stage else self._accumulate_batch(step)
            norm = self._optimizer.step(step) if math.isfinite(loss) else None
            self._optimizer.clear_gradient()
        if norm is None:
            self._skip_step(step)
            return
        self._gradient_norm = norm
        self._skipped_in_a_row = 0
        self._state.count_step(tokens, loss, self._batches.position)
        self._unreported += StepTotals(tokens=tokens, steps=1, loss=loss)

    def _accumulate_batch(self, step: int) -> tuple[int, float]:
        """Accumulate the gradient of the next batch of this peer's text; return its tokens and mean loss."""
        tokens = self._manifest.train.batch_tokens
        with name_text_faults(self._manifest.data):
            windows = self._batches.next_batch(tokens // self._manifest.model.context)
        return tokens, self._accumulate_gradient(windows, self._optimizer.lookahead_weights(step))

    def _accumulate_gradient(self, windows: Tensor, at_weights: Tensor | None) -> float:
        """Accumulate the gradient of a batch, in smaller microbatches from now on if memory runs out."""
        while True:
            try:
                return accumulate_gradient(self._model, windows, self._microbatch, at_weights)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or self._microbatch == 1:
                    raise
            self._optimizer.clear_gradient()
            self._microbatch //= 2
            self._state.update(obstacle="out of memory")
            line = f"continuing with microbatches of {self._microbatch} sequences"
            self._channel.send(TrainerWarning(reason="out of memory", line=line))

    def _skip_step(self, step: int) -> None:
        self._skipped_in_a_row += 1
        self._state.update(position=self._batches.position, obstacle="step skipped")
        line = f"the loss of inner step {step} or its gradient is not finite"
        self._channel.send(TrainerWarning(reason="step skipped", line=line))
        if self._skipped_in_a_row >= MAX_SKIPPED_STEPS_IN_A_ROW:
            raise MurmurError(
                f"the loss was not finite for {MAX_SKIPPED_STEPS_IN_A_ROW} steps in a row; lower train.learning_rate"
            )

    def _report_and_save(self) -> None:
        now = time.monotonic()
        if now - self._reported_at >= PROGRESS_SECONDS:
            self._send_progress()
        if now - self._saved_at >= SNAPSHOT_SECONDS:
            self._save()

    def _send_progress(self) -> None:
        self._send_skipped_rows()
        now, work = time.monotonic(), self._unreported
        if not work.steps:
            return
        speed = work.tokens / max(1e-9, now - self._reported_at)
        counters = self._state.counters
        self._channel.send(
            TrainerProgress(
                step=counters.step,
                tokens=counters.tokens,
                loss=work.mean_loss,
                tokens_per_second=speed,
                seconds=self._timer.seconds,
                learning_rate=self._optimizer.learning_rate(counters.step - 1),
                gradient_norm=self._gradient_norm,
                device_use=measure_device_use(self._device),
            )
        )
        self._unreported = StepTotals()
        self._reported_at = now

    def _send_skipped_rows(self) -> None:
        report = self._corpus.skip_log.take_report()
        if report is not None:
            self._channel.send(RowsSkipped(counts=dict(report.counts), lines=report.lines))

    def _save(self) -> None:
        with self._timer.measure("snapshot"):
            self._state.update(seconds=dict(self._timer.seconds))
            self._state.save()
        self._saved_at = time.monotonic()

    def _evaluate(self, round_number: int) -> None:
        with self._timer.measure("evaluate"):
            weights = self._shared_memory.anchor(round_number)[: self._model.flat.numel()]
            loss, tokens = validation_loss(self._model, weights, self._validation)
        self._channel.send(Evaluated(round=round_number, loss=loss, tokens=tokens))


def _merge_pending(waiting: ApplyAnchor | None, command: ApplyAnchor) -> ApplyAnchor:
    """Return the newer anchor, with the outcome that an anchor not yet applied brought.

    The daemon sends each outcome once.
    """
    if waiting is None or command.outcome != "none":
        return command
    return command.model_copy(update={"outcome": waiting.outcome})


def _open_corpus(manifest: Manifest, base: Path) -> Corpus:
    corpus = open_source(manifest.data, base)
    corpus.require_vocabulary(manifest.model.vocabulary)
    return corpus

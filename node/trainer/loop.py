"""The trainer of a node: inner steps on the run's text, or on the microbatches of a pipeline's stage.

node.trainer.exchange_loop does what lies between the steps.
"""

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from node.data import BatchReader, Corpus, open_corpus, validation_sets
from node.data.source import require_document_end
from node.from_manifest import in_memory_mode
from node.model.memory_estimate import fit_microbatch
from node.step_settings import StepSettings, step_settings
from node.trainer.counters import StepTotals
from node.trainer.devices.compiling import build_trained_model, uncompiled
from node.trainer.devices.device import (
    add_device_uses,
    choose_devices,
    count_names,
    describe_missing_bf16,
    device_class,
    device_name,
    is_out_of_memory,
    limit_memory,
    measure_device_use,
)
from node.trainer.devices.pause_when_busy import DevicePause, usage_meter_for
from node.trainer.ending import OtherRanksNeeded
from node.trainer.exchange_loop import ExchangeLoop
from node.trainer.inner_step import InnerOptimizer, ValidationLoss, accumulate_gradient, combine_sources, validate
from node.trainer.ipc.activation_memory import ActivationMemory
from node.trainer.ipc.channel import (
    Activity,
    ApplyAnchor,
    ContributionHeader,
    PauseChanged,
    RowsSkipped,
    ToTrainer,
    TrainerChannel,
    TrainerConfig,
    TrainerProgress,
    TrainerWarning,
)
from node.trainer.ipc.rollout_messages import RolloutFound, RolloutsWanted
from node.trainer.ipc.shared_memory import SharedMemory
from node.trainer.ipc.stage_messages import ComputeStage, DrawMicrobatch, DropStageSum, StageCommand, TakeStageStep
from node.trainer.live import LiveVectors, live_vectors
from node.trainer.reinforcement import RolloutLearner
from node.trainer.site.messages import own_version
from node.trainer.stages.faulty_stage import build_stage_work
from node.trainer.stages.stage_work import EXACT_READER, StageWork, stage_train
from node.trainer.state import TrainerState
from optim.exchange import ContributionEncoder
from optim.round_plan import RoundPlanner
from protocol.audits import Conditions
from protocol.errors import DeviceError, MurmurError
from protocol.manifest.run import Manifest
from protocol.manifest.sections import TrainSection

if TYPE_CHECKING:
    from node.trainer.ranks.leader import RankLeader
    from node.trainer.site.head import JoinedMachine, SiteHead

MAX_SKIPPED_STEPS_IN_A_ROW = 20


class Trainer(ExchangeLoop):
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
        self._manifest = manifest
        self._devices = choose_devices(config.options)
        self._device = self._devices[0]
        options, held = config.options, in_memory_mode(manifest, config.options.memory_mode)
        ranks = len(self._devices)
        self._microbatch = fit_microbatch(held, options.memory, self._device.type, options.recompute, ranks)
        limit_memory(config.options.memory, self._device)
        self._pause = DevicePause(usage_meter_for(self._device) if config.options.pause_when_busy else None)
        self._ranks: RankLeader | None = None
        self._is_compiled = False
        if config.halvings:
            self._microbatch = max(1, self._microbatch >> config.halvings)
            _warn_of_memory(channel, self._microbatch)
        self._site = self._open_site(config, channel) if config.site else None
        self._machines: tuple[JoinedMachine, ...] = self._gather_machines(config)
        live = (
            self._build_ranks(config, program, shared_memory, channel)
            if self.ranks > 1
            else self._build_model(config, program, channel, has_open_gradient=activations is not None)
        )
        settings = config.settings or step_settings(manifest, 0, 0)
        self._optimizer.train = self._train_of(settings)
        if self._device.type == "cuda":
            _pin(shared_memory, channel)
        if line := describe_missing_bf16(self._device):
            channel.send(TrainerWarning(reason="no bf16", line=line))
        state = TrainerState(live, self._optimizer, program, ContributionEncoder(program), shared_memory)
        self._corpus = _open_corpus(manifest, Path(config.base))
        self._held_out = validation_sets(self._corpus, manifest.model.context, config.validation_tokens)
        super().__init__(config, state, shared_memory, channel)
        counters = state.counters
        name = EXACT_READER if manifest.pipeline.is_exact else config.peer_id
        self._batches = BatchReader(self._corpus, manifest.model.context, manifest.run.seed, name, counters.position)
        self._batches.weights = settings.weights
        is_restarted = shared_memory.heartbeat_count > 0
        self._stage = (
            build_stage_work(manifest, self._model, activations, self._batches, is_restarted) if activations else None
        )
        if self._stage:
            self._stage.start = config.start
            self._stage.begin_step(counters.round)
        self._text = self._corpus.fingerprint(manifest.model.context) if manifest.audits.share else ""
        self._learner = self._build_learner(config) if manifest.rl is not None else None
        self._rollouts_since = time.monotonic()  # the last step or anchor
        self._skipped_in_a_row = 0
        self._gradient_norm = 0.0  # of the newest step

    def _build_model(
        self, config: TrainerConfig, program: RoundPlanner, channel: TrainerChannel, *, has_open_gradient: bool
    ) -> LiveVectors:
        """Build the model on one device."""
        manifest, base = self._manifest, Path(config.base)
        self._model, fault = build_trained_model(manifest, self._device, self._microbatch, config.options, base)
        self._note_compiled(config, channel, fault)
        self._optimizer = InnerOptimizer(self._model, self._manifest.train, program.method.inner)
        return live_vectors(self._model, self._optimizer, has_open_gradient=has_open_gradient)

    def _build_learner(self, config: TrainerConfig) -> RolloutLearner:
        if self.ranks > 1:
            raise DeviceError("a run with [rl] trains on one device; leave out --devices, or name one")
        device = device_class(self._device, self._is_compiled, self.ranks, config.options)
        learner = RolloutLearner(self._manifest, Path(config.base), self._model, device)
        learner.keep_policy(self._state.counters.round, self._anchor_weights(self._state.counters.round))
        return learner

    def _anchor_weights(self, round_number: int) -> Tensor:
        return self._shared_memory.anchor(round_number)[: self._model.flat.numel()]

    def _note_compiled(self, config: TrainerConfig, channel: TrainerChannel, fault: str) -> None:
        self._is_compiled = config.options.compile and not fault
        if fault:
            channel.send(TrainerWarning(reason="not compiled", line=f"training without --compile: {fault}"))

    def _build_ranks(
        self, config: TrainerConfig, program: RoundPlanner, shared_memory: SharedMemory, channel: TrainerChannel
    ) -> LiveVectors:
        """Build the model in parts, on several devices."""
        from node.trainer.ranks.leader import RankPlan, start_ranks  # torch's FSDP takes a second to import

        plan = RankPlan(config, self._devices, self._microbatch, self._site, self._machines)
        self._ranks = start_ranks(plan, program, shared_memory, channel.fileno())
        self._note_compiled(config, channel, self._ranks.compile_fault)
        self._model, self._optimizer = self._ranks.model, self._ranks.optimizer
        return self._ranks

    def _open_site(self, config: TrainerConfig, channel: TrainerChannel) -> "SiteHead":
        """Listen for the other machines of this site."""
        from node.trainer.site.head import SiteHead, SiteRules

        assert config.site is not None
        devices = len(self._devices) if config.site.shard == "machine" else None
        rules = SiteRules(own_version(torch.__version__), devices, self._device.type)
        return SiteHead(config.site, rules, channel)

    def _gather_machines(self, config: TrainerConfig) -> "tuple[JoinedMachine, ...]":
        if self._site is None or config.site is None:
            return ()
        return self._site.gather(config.site.gather_seconds)

    @property
    def device(self) -> str:
        others = (name for machine in self._machines for name in machine.offer.names)
        return count_names((*map(device_name, self._devices), *others))

    @property
    def ranks(self) -> int:
        return len(self._devices) + sum(len(machine.offer.devices) for machine in self._machines)

    @property
    def conditions(self) -> Conditions:
        return Conditions(
            device=device_class(self._device, self._is_compiled, self.ranks, self._config.options),
            text=self._text,
            threads=self._config.options.thread_count,
            microbatch=self._microbatch,
        )

    @property
    def is_between_steps(self) -> bool:
        return self._stage is None or self._stage.is_between_steps

    @property
    def encodes_aside(self) -> bool:
        return self._device.type == "cuda" and self._ranks is None and self._stage is None

    @property
    def adopts_aside(self) -> bool:
        return self.encodes_aside and not self._manifest.audits.share

    @property
    def gradient_norm(self) -> float:
        return self._gradient_norm

    def run(self) -> None:
        """Train until the daemon sends Stop."""
        if self._ranks is None:
            self._train_until_stopped()
            return
        with self._ranks.grace():
            self._train_until_stopped()
        self._ranks.close()

    def _train_until_stopped(self) -> None:
        self.open()
        while self.prepare_step():
            self._take_step()
            self.report_and_save()

    def learning_rate(self, step: int) -> float:
        return self._optimizer.learning_rate(step)

    def validate(self, round_number: int) -> ValidationLoss:
        if self._ranks is not None:
            measured = [self._ranks.measure_loss(round_number, held.batches) for held in self._held_out]
            return combine_sources(self._held_out, measured)
        weights = self._anchor_weights(round_number)
        with uncompiled(self._is_compiled):
            return validate(self._model, weights, self._held_out)

    def make_contribution(self) -> ContributionHeader:
        return self._state.make_contribution(self._stage.exact if self._stage else None)

    def on_anchor(self, command: ApplyAnchor) -> None:
        if self._stage is not None and self._stage.begin_step(command.round):
            self._state.update(since_message=StepTotals(), unreported=StepTotals())
        if command.settings is not None:
            self._optimizer.train = self._train_of(command.settings)
            self._batches.weights = command.settings.weights
        if self._learner is not None:
            weights = self._anchor_weights(command.round)
            self._learner.keep_policy(command.round, weights, is_other_chain=command.is_other_chain)
            self._rollouts_since = time.monotonic()

    def poll_commands(self) -> None:
        if self._site and (newcomer := self._site.newcomer):
            self._state.save()
            raise OtherRanksNeeded(f"the machine {newcomer} joins this site")
        if self._stage is None or not self._stage.is_step_due:
            super().poll_commands()

    def reason_to_wait(self) -> Activity | None:
        self._update_pause()
        if (self._pause.is_paused or super().reason_to_wait()) and not (self._stage and self._stage.is_offer_due):
            return "pause"
        if self._learns_rollouts and not self._has_rollouts():
            return "idle"
        return "idle" if self._stage is not None and not self._stage.is_step_due else None

    def handle_other(self, command: ToTrainer) -> None:
        match command:
            case DrawMicrobatch() | ComputeStage() | TakeStageStep() | DropStageSum() if self._stage:
                self._serve_stage(self._stage, command)
            case RolloutFound() if self._learner:
                self._learner.receive(command.maker, command.body)
            case _:
                super().handle_other(command)

    def report(self) -> None:
        report = self._corpus.skip_log.take_report()
        if report is not None:
            self._channel.send(RowsSkipped(counts=dict(report.counts), lines=report.lines))

    def add_measurements(self, progress: TrainerProgress) -> TrainerProgress:
        if self._ranks is None:
            return progress.model_copy(update={"device_use": measure_device_use(self._device)})
        cards = self._ranks.measure_devices()
        return progress.model_copy(update={"device_use": add_device_uses(cards), "cards": cards})

    def _train_of(self, settings: StepSettings) -> TrainSection:
        stages = self._manifest.pipeline.stages
        return stage_train(settings.train, stages) if stages > 1 else settings.train

    def _serve_stage(self, stage: StageWork, command: StageCommand) -> None:
        """Do what the daemon says, in the order of its messages; the loop makes the step as soon as it may."""
        with self._timer.measure("compute"):
            reply = stage.serve(command)
        self._state.update(position=self._batches.position)
        if reply is not None:
            self._channel.send(reply)

    def _update_pause(self) -> None:
        """Pause or resume as other programs use the device, and report it."""
        reason = self._pause.update(time.monotonic())
        if reason is not None:
            self._channel.send(PauseChanged(reason=reason))

    @property
    def _learns_rollouts(self) -> bool:
        """Return whether the steps of the round are made of rollouts."""
        rl = self._manifest.rl
        return rl is not None and rl.has_begun(self._state.counters.round)

    def _has_rollouts(self) -> bool:
        """Return whether a step of rollouts may begin: with a whole batch, or with the groups that came in time.

        If none came in time, the steps that were made are sent, so that nobody waits for rollout peers that are gone.
        """
        assert self._learner is not None and self._manifest.rl is not None
        if missing := self._learner.request():
            self._channel.send(RolloutsWanted(count=missing))
        if self._learner.waiting >= self._manifest.rl.groups:
            return True
        if time.monotonic() - self._rollouts_since < self._manifest.rl.wait_seconds:
            return False
        if not self._learner.waiting and self._state.counters.since_message.steps:
            self._step_target.set(self._state.counters.round, 1)
        return bool(self._learner.waiting)

    def _take_rollout_step(self, learner: RolloutLearner) -> None:
        """Make one inner step of rollouts; one whose groups have no variance counts, and changes no weight."""
        counters, position = self._state.counters, self._batches.position
        with self._timer.measure("compute"), uncompiled(self._is_compiled):
            lookahead = self._optimizer.lookahead_weights(counters.step)
            made = learner.learn(counters.round, self._microbatch, counters.learned, lookahead)
            norm: float | None = 0.0
            if made.has_gradient:
                norm = self._state.take_step(
                    made.tokens, made.loss, position, learned=made.learned, credited=made.credits
                )
            elif made.tokens:
                self._state.count_step(made.tokens, made.loss, position, learned=made.learned, credited=made.credits)
            self._optimizer.clear_gradient()
        self._rollouts_since = time.monotonic()
        if norm is None or not made.tokens:
            self._state.update(learned=made.learned)
        if not made.has_gradient:
            self._state.save()
        self._channel.send(made.report)
        if norm is None:
            self._skip_step(counters.step)
        elif made.tokens:
            self._gradient_norm, self._skipped_in_a_row = norm, 0
            self.report_step(made.tokens, made.loss)

    def _take_step(self) -> None:
        """Make one inner step; skip it if the loss or the gradient is not finite."""
        if self._learner is not None and self._learns_rollouts:
            self._take_rollout_step(self._learner)
            return
        with self._timer.measure("compute"):
            step = self._state.counters.step
            tokens, loss = self._stage.take() if self._stage else self._accumulate_batch(step)
            ledger, position = self._stage.take_ledger() if self._stage else None, self._batches.position
            norm = self._state.take_step(tokens, loss, position, ledger) if math.isfinite(loss) else None
            self._optimizer.clear_gradient()
        if norm is None:
            self._skip_step(step)
            return
        self._gradient_norm = norm
        self._skipped_in_a_row = 0
        self.report_step(tokens, loss)

    def _accumulate_batch(self, step: int) -> tuple[int, float]:
        """Accumulate the gradient of the next batch of this peer's text; return its tokens and mean loss."""
        tokens = self._manifest.train.batch_tokens
        windows = self._batches.next_batch(tokens // self._manifest.model.context)
        if self._ranks is not None:
            return tokens, self._ranks.accumulate_gradient(windows, step)
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
            _warn_of_memory(self._channel, self._microbatch)

    def _skip_step(self, step: int) -> None:
        self._skipped_in_a_row += 1
        self._state.update(position=self._batches.position, obstacle="step skipped")
        line = f"the loss of inner step {step} or its gradient is not finite"
        self._channel.send(TrainerWarning(reason="step skipped", line=line))
        if self._skipped_in_a_row >= MAX_SKIPPED_STEPS_IN_A_ROW:
            raise MurmurError(
                f"the loss was not finite for {MAX_SKIPPED_STEPS_IN_A_ROW} steps in a row; lower train.learning_rate"
            )


def _warn_of_memory(channel: TrainerChannel, microbatch: int) -> None:
    line = f"continuing with microbatches of {microbatch} sequences"
    channel.send(TrainerWarning(reason="out of memory", line=line))


def _pin(shared_memory: SharedMemory, channel: TrainerChannel) -> None:
    shared_memory.pin()
    if not shared_memory.is_pinned:
        line = "the system does not lock the shared memory: contributions and snapshots take longer"
        channel.send(TrainerWarning(reason="memory not pinned", line=line))


def _open_corpus(manifest: Manifest, base: Path) -> Corpus:
    corpus = open_corpus(manifest.data, base, manifest.method.modules)
    corpus.require_vocabulary(manifest.model.vocabulary)
    require_document_end(manifest.model, manifest.data, base)
    return corpus

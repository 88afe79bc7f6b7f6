"""The trainer's loop: inner steps, messages, adoptions (when: see node.trainer.pace).

State is snapshotted into the arena every SNAPSHOT_SECONDS and, always before the daemon is told, at each message and
adoption: whatever the daemon knows of survives this process.
"""

import math
import time
from functools import partial
from pathlib import Path

from torch import Tensor

from node.arena import Arena
from node.channel import (
    Activity,
    Adopt,
    Adopted,
    Config,
    Evaluate,
    Evaluated,
    Hurry,
    Mishap,
    Pausing,
    Progress,
    Ready,
    Revised,
    Snapshotted,
    Stop,
    Stopped,
    TakeSnapshot,
    ToTrainer,
    TrainerEnd,
)
from node.data import Batches, Corpus, open_source, validation_batches
from node.footprint import microbatch_within
from node.model import Llama
from node.trainer.activity import Stopwatch
from node.trainer.courtesy import Courtesy
from node.trainer.device import choose_device, device_name, is_out_of_memory, keep_within
from node.trainer.inner import InnerOptimizer
from node.trainer.inner_state import InnerState, Work
from node.trainer.inner_step import accumulate_gradient, validation_loss
from node.trainer.pace import Stretch, Wanted, is_message_due, may_adopt, must_wait
from node.trainer.usage import meter_of
from optim.exchange import Sender
from optim.program import Program
from protocol.blobs.blob import Blob
from protocol.errors import MalformedError, MurmurError
from protocol.manifest import Manifest

SNAPSHOT_SECONDS = 10.0
PROGRESS_SECONDS = 1.0
WAIT_SECONDS = 1.0
LOOK_SECONDS = 2.0  # between two measurements of what others use
MAX_SKIPPED_IN_A_ROW = 20


class Trainer:
    """One model in training; `run` returns when the daemon says Stop. Manifest and program are those of `config`."""

    def __init__(self, config: Config, manifest: Manifest, program: Program, arena: Arena, channel: TrainerEnd) -> None:
        self._config = config
        self._manifest = manifest
        self._arena = arena
        self._channel = channel
        self._device = choose_device(config.device)
        self._microbatch = microbatch_within(manifest, config.memory, self._device.type)
        keep_within(config.memory, self._device)
        self._meter = meter_of(self._device) if config.pause_when_busy else None
        self._courtesy = Courtesy(self._meter.pause_share, self._meter.resume_share) if self._meter else None
        self._looked_at = -math.inf
        self._model = Llama(manifest.model, self._device)
        self._optimizer = InnerOptimizer(self._model, manifest.train, program.method.inner)
        if self._device.type == "cuda":
            self._pin()
        self._state = InnerState(self._model, self._optimizer, program, Sender(program), arena)
        self._corpus = _open_corpus(manifest, Path(config.base))
        if not self._state.restore():
            self._state.start(config.round)
        counters = self._state.counters
        self._batches = Batches(
            self._corpus, manifest.model.context, manifest.run.seed, config.peer_id, counters.position
        )
        self._watch = Stopwatch(counters.seconds)
        self._skipped_in_a_row = 0
        self._unshown = Work()
        self._shown_at = time.monotonic()
        self._saved_at = time.monotonic()
        self._new_anchor: Adopt | None = None
        self._wanted = Wanted()
        self._stretch = Stretch()
        self._stopping = False

    def _pin(self) -> None:
        self._arena.pin()
        if not self._arena.is_pinned:
            line = "the system does not lock what daemon and trainer share: messages and snapshots take longer"
            self._channel.send(Mishap(reason="memory not pinned", line=line))

    def run(self) -> None:
        self._announce()
        while True:
            self._arena.beat()
            self._obey(self._channel.receive())
            if self._stopping:
                return
            self._look_around()
            counters, plan = self._state.counters, self._state.plan
            if self._new_anchor is not None and may_adopt(counters, plan):
                self._adopt(self._new_anchor)
            elif self._is_message_due():
                self._send_message()
            elif self._courtesy is not None and self._courtesy.paused:
                self._wait("pause")
            elif must_wait(counters, plan):
                self._wait("wait")
            else:
                self._train()
                self._keep_up()

    def _is_message_due(self) -> bool:
        counters, plan = self._state.counters, self._state.plan
        seconds = self._stretch.seconds(counters.since_message.steps, time.monotonic())
        return is_message_due(counters, self._wanted.of(plan.steps, counters.round), plan.method.schedule, seconds)

    def _announce(self) -> None:
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
            self._channel.send(outstanding.message())

    def _obey(self, command: ToTrainer | None) -> None:
        match command:
            case None:
                return
            case Adopt():
                self._new_anchor = _newest(self._new_anchor, command)
                self._wanted.ask(command.round, command.steps)
            case Hurry():
                self._wanted.ask(command.round, 1)
            case Evaluate():
                self._evaluate(command.round)
            case TakeSnapshot():
                self._save()
                self._channel.send(Snapshotted(step=self._state.counters.step))
            case Stop():
                if self._new_anchor is not None:
                    self._adopt(self._new_anchor)
                self._save()
                self._stopping = True
                self._channel.send(Stopped())
            case _:
                raise MalformedError(f"the daemon sent {command.kind!r} in the middle of training")

    def _send_message(self) -> None:
        with self._watch.spend("encode"):
            message = self._state.message()
        self._save()
        self._show_progress()
        self._channel.send(message)

    def _adopt(self, command: Adopt) -> None:
        self._new_anchor = None
        with self._watch.spend("adopt"):
            self._state.adopt(command.round, command.fate)
            for entry in command.revised:
                if not self._state.revise(entry.message, entry.fate, partial(self._payloads, entry)):
                    line = f"all that was still to be sent, with the message of round {entry.message.round}"
                    self._channel.send(Mishap(reason="work dropped", line=line))
        self._save()
        self._channel.send(Adopted(round=command.round))

    def _payloads(self, revised: Revised) -> list[bytes]:
        """None at all where one of them is gone or damaged."""
        folder = Path(self._config.blobs)
        try:
            payloads = [(folder / name).read_bytes() for name in revised.parts]
        except OSError as error:
            self._channel.send(Mishap(reason="message gone", line=f"cannot read an earlier message: {error}"))
            return []
        whole = all(Blob.of(data).name == name for data, name in zip(payloads, revised.parts, strict=True))
        return payloads if whole else []

    def _look_around(self) -> None:
        """Stand back where others use the device, or go on; the daemon is told."""
        now = time.monotonic()
        if self._meter is None or self._courtesy is None or now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at, share = now, self._meter.share()
        if share is not None and self._courtesy.judge(share, now):
            reason = f"others use {share:.0%} {self._meter.what}" if self._courtesy.paused else ""
            self._channel.send(Pausing(reason=reason))

    def _wait(self, activity: Activity) -> None:
        with self._watch.spend(activity):
            command = self._channel.receive(WAIT_SECONDS)
        self._obey(command)

    def _train(self) -> None:
        """One inner step; left out when the loss or the gradient is not finite."""
        with self._watch.spend("compute"):
            sequences = self._manifest.train.batch_tokens // self._manifest.model.context
            windows, step = self._batches.next(sequences), self._state.counters.step
            place = self._optimizer.look_ahead(step)
            loss = self._gradient(windows, place)
            applied = math.isfinite(loss) and self._optimizer.step(step)
            self._optimizer.clear_gradient()
        if not applied:
            self._leave_out(step)
            return
        self._skipped_in_a_row = 0
        tokens = self._manifest.train.batch_tokens
        self._state.count_step(tokens, loss, self._batches.position)
        self._unshown += Work(tokens=tokens, steps=1, loss=loss)

    def _gradient(self, windows: Tensor, place: Tensor | None) -> float:
        """In smaller pieces from here on where the memory does not suffice; the batch stays what the manifest says."""
        while True:
            try:
                return accumulate_gradient(self._model, windows, self._microbatch, place)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or self._microbatch == 1:
                    raise
            self._optimizer.clear_gradient()
            self._microbatch //= 2
            line = f"going on with microbatches of {self._microbatch} sequences"
            self._channel.send(Mishap(reason="memory short", line=line))

    def _leave_out(self, step: int) -> None:
        self._skipped_in_a_row += 1
        self._state.update(position=self._batches.position)
        line = f"the loss of inner step {step} or its gradient is not finite"
        self._channel.send(Mishap(reason="step left out", line=line))
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise MurmurError(
                f"the loss was not finite for {MAX_SKIPPED_IN_A_ROW} steps in a row; lower train.learning_rate"
            )

    def _keep_up(self) -> None:
        now = time.monotonic()
        if now - self._shown_at >= PROGRESS_SECONDS:
            self._show_progress()
        if now - self._saved_at >= SNAPSHOT_SECONDS:
            self._save()

    def _show_progress(self) -> None:
        now, work = time.monotonic(), self._unshown
        if not work.steps:
            return
        speed = work.tokens / max(1e-9, now - self._shown_at)
        counters = self._state.counters
        self._channel.send(
            Progress(
                step=counters.step,
                tokens=counters.tokens,
                loss=work.mean_loss,
                tokens_per_second=speed,
                seconds=self._watch.seconds,
            )
        )
        self._unshown = Work()
        self._shown_at = now

    def _save(self) -> None:
        with self._watch.spend("snapshot"):
            self._state.update(seconds=dict(self._watch.seconds))
            self._state.save()
        self._saved_at = time.monotonic()

    def _evaluate(self, round_number: int) -> None:
        with self._watch.spend("evaluate"):
            batches = validation_batches(self._corpus, self._manifest.model.context, self._config.validation_tokens)
            weights = self._arena.anchor(round_number)[: self._model.flat.numel()]
            loss, tokens = validation_loss(self._model, weights, batches)
        self._channel.send(Evaluated(round=round_number, loss=loss, tokens=tokens))


def _newest(waiting: Adopt | None, command: Adopt) -> Adopt:
    """A fate is told once: where its anchor was not taken yet, it goes with the next one."""
    if waiting is None or command.fate != "none":
        return command
    return command.model_copy(update={"fate": waiting.fate})


def _open_corpus(manifest: Manifest, base: Path) -> Corpus:
    corpus = open_source(manifest.data, base)
    corpus.require_vocabulary(manifest.model.vocabulary)
    return corpus

"""Run all stages of a pipeline in virtual time: their rounds in virtual swarms, their microbatches by the stage loops.

Each peer serves one stage and owns microbatches of its own text, as on the wire. Its machines are those of the daemon:
`node.loop.stage_loop` decides on routes, admission, replays and steps; `node.loop.round_loop` decides on rounds.
"""

import hashlib
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from node.data import BatchReader, Corpus
from node.loop.stage_events import (
    PeersSeen,
    StageAction,
    StageAnchorApplied,
    StageContributed,
    StageEvent,
    TrainerReady,
)
from node.loop.stage_loop import build_stage_loop, stage_settings
from node.model import WHOLE, LanguageModel, cuts_of
from node.simulation.config import SimulationConfig
from node.simulation.measurement import CurveRecorder, Evaluator, SimulationResult
from node.simulation.swarm import VirtualSwarm
from node.simulation.virtual.network import VirtualClock, VirtualNetwork
from node.simulation.virtual.peer import VirtualPeer
from node.simulation.virtual.stage import Computation, StageProcess, StageTrainer, StageWorld
from node.simulation.virtual.trainer import VirtualTrainer
from node.step_settings import StepSettings, step_settings
from node.trainer.stages.stage_pass import FORMATS, backward_stage, finish_microbatch, forward_stage
from node.trainer.stages.stage_work import stage_train
from optim.errors import CodecError
from optim.method import Method
from protocol.blobs.blob import DIGEST_BYTES, Blob
from protocol.errors import MurmurError
from protocol.identity import PeerId
from protocol.pipeline import owner_events, server_events
from protocol.pipeline.exact import StepReports
from protocol.pipeline.messages import HeldBlob, Input, Key, Task
from protocol.pipeline.owner import Owner
from protocol.pipeline.routing import StagePeer
from protocol.pipeline.stage import StageManifest

NOT_FINITE = "a simulated peer's gradient is not finite; lower train.learning_rate"
FORWARD_UNITS, BACKWARD_UNITS = 1, 3  # a third of a forward and backward pass; the latter computes the former again
OWN_CALL_SECONDS = 1e-4  # of a peer to itself; an answer and an invitation at one moment would repeat without end


@dataclass(frozen=True)
class PipelineCounts:
    """Microbatches by what their owners count; see `protocol.pipeline.owner_events.OwnerCounts`."""

    done: int = 0
    partly_counted: int = 0
    lost: int = 0
    replayed: int = 0

    @classmethod
    def of(cls, owners: list[Owner]) -> "PipelineCounts":
        """Return the sums over these owners."""
        counts = [owner.counts for owner in owners]
        return cls(**{name: sum(getattr(each, name) for each in counts) for name in asdict(cls())})

    def __add__(self, other: "PipelineCounts") -> "PipelineCounts":
        return PipelineCounts(**{name: count + getattr(other, name) for name, count in asdict(self).items()})


class StageSteps(VirtualTrainer):
    """The trainer's state of a virtual peer that serves one stage: its gradient comes from microbatches."""

    gradients = 0  # in the open step
    loss_sum = 0.0
    is_step_due = False
    may_step = False  # the round allows the next step

    def use_settings(self, settings: StepSettings) -> None:
        """Make the next inner steps with these settings; a stage clips at its share of the norm."""
        super().use_settings(settings)
        self.train = stage_train(settings.train, self._manifest.pipeline.stages)

    @property
    def model(self) -> LanguageModel:
        return self._model

    def open_gradient(self) -> Tensor:
        """Return the sum of the gradients of the open step."""
        return self._model.attach_gradient()

    def step(self) -> None:
        """Make an inner step of the microbatches since the last one. Raises MurmurError, as `VirtualTrainer.step`."""
        count = max(1, self.gradients)
        self.open_gradient().mul_(1 / count)
        microbatch_tokens = self._manifest.pipeline.microbatch * self._manifest.model.context
        norm = self.state.take_step(self.gradients * microbatch_tokens, self.loss_sum / count, 0)
        self._optimizer.clear_gradient()
        self.gradients, self.loss_sum, self.is_step_due, self.may_step = 0, 0.0, False, False
        if norm is None:
            raise MurmurError(NOT_FINITE)


class MicrobatchTrainer(StageTrainer):
    """Passes of microbatches at one peer, with real activations and gradients."""

    def __init__(self, peer: VirtualPeer, steps: StageSteps, config: SimulationConfig, reader: BatchReader) -> None:
        self.steps = steps
        self._peer = peer
        self._manifest = config.manifest
        self._reader = reader
        self._format = FORMATS[config.manifest.pipeline.activations]
        self._sizes = stage_settings(StageManifest.of(config.manifest, config.cut.stage))
        self._is_last = self._sizes.is_last
        units = self._sizes.step_size * self._sizes.stages * BACKWARD_UNITS
        self._unit = 1 / (config.speeds[peer.slot] * units)

    def draw(self, key: Key, window: int | None) -> tuple[Blob, object]:
        chain, manifest = self._peer.chain, self._manifest
        self._reader.weights = manifest.source_weights(chain.round, chain.tokens)
        windows = self._reader.next_batch(manifest.pipeline.microbatch)
        return _blob(f"{key.owner} {key.serial} tokens", self._sizes.token_bytes), windows

    def seconds(self, task: Task) -> float:
        if task.direction == "backward":
            return BACKWARD_UNITS * self._unit
        # The last stage computes nothing before its backward pass, which begins with the loss.
        return 0.0 if self._is_last else FORWARD_UNITS * self._unit

    def compute(self, order: server_events.Compute, inputs: Mapping[Input, object]) -> Computation:
        task, tensors = order.task, {name: _tensor(content) for name, content in inputs.items()}
        loss: float | None = None
        if task.direction == "forward":
            output = self._forward(tensors)
        else:
            before = None if order.adds else self.steps.open_gradient().clone()
            loss, output = self._backward(tensors)
            if before is None:
                self.steps.gradients += 1
                self.steps.loss_sum += loss or task.loss or 0.0
            else:
                self.steps.open_gradient().copy_(before)
        if output is None:
            return Computation(loss=loss)
        name = f"{task.owner} {task.serial} {task.direction} {task.attempt} {name_of(self._peer)}"
        return Computation(_blob(name, self._sizes.activation_bytes), self._on_wire(output), loss)

    def _forward(self, tensors: Mapping[Input, Tensor]) -> Tensor | None:
        if self._is_last:
            return None
        tokens = _tokens(tensors)
        source = tensors["activation"] if tokens is None or "activation" in tensors else tokens
        return forward_stage(self.steps.model, source, tokens)

    def _backward(self, tensors: Mapping[Input, Tensor]) -> tuple[float | None, Tensor | None]:
        tokens = _tokens(tensors)
        source = tensors["activation"] if tokens is None or "activation" in tensors else tokens
        if self._is_last:
            return finish_microbatch(self.steps.model, source, tensors["tokens"][:, 1:], 1.0, tokens)
        return None, backward_stage(self.steps.model, source, tensors["gradient"], tokens)

    def take_step(self, order: server_events.TakeStep, stepped: Callable[[], None]) -> None:
        self.steps.is_step_due = True
        stepped_later = partial(self._step_if_due, stepped)
        self._peer.swarm.clock.schedule(0.0, stepped_later)

    def drop_sum(self) -> None:
        raise AssertionError("simulated steps are local")

    def _step_if_due(self, stepped: Callable[[], None]) -> None:
        self.make_step()
        stepped()

    def make_step(self) -> None:
        """Make the step if it is due and the round allows it."""
        if self.steps.is_step_due and self.steps.may_step and self._peer.is_alive:
            self._peer.on_step()

    def _on_wire(self, activation: Tensor) -> Tensor:
        try:
            return self._format.round_trip(activation)
        except CodecError as error:
            raise MurmurError(NOT_FINITE) from error


def _tokens(tensors: Mapping[Input, Tensor]) -> Tensor | None:
    """Return the token ids (B, T) of a task, if it has them."""
    return tensors["tokens"][:, :-1] if "tokens" in tensors else None


def _tensor(content: object) -> Tensor:
    assert isinstance(content, Tensor)
    return content


def _blob(name: str, size: int) -> Blob:
    """Return a blob with a digest of its name; what it contains stays a tensor."""
    return Blob(hashlib.blake2b(name.encode(), digest_size=DIGEST_BYTES).digest(), size)


class StageSwarm(VirtualSwarm):
    """The peers of one stage. They make a step whenever the microbatches of one have passed through."""

    world: "PipelineWorld"

    def new_trainer(self, peer: VirtualPeer) -> StageSteps:
        """Start a trainer of the stage at the peer's head, and the process that serves it."""
        config = self.config
        steps = StageSteps(
            config.build_model(),
            config.manifest,
            self.planner,
            self._corpus,
            self._new_encoder(peer.slot),
            peer.peer_id,
        )
        steps.start(peer.chain.round, peer.applied_state[0].shared_vectors(self.method))
        steps.use_settings(step_settings(self.manifest_with_target, peer.chain.round, peer.chain.tokens))
        reader = BatchReader(self._corpus, config.manifest.model.context, config.manifest.run.seed, name_of(peer))
        self.world.start(peer, MicrobatchTrainer(peer, steps, config, reader))
        return steps

    def begin_step(self, peer: VirtualPeer) -> None:
        """Let the peer make its next step once it is due."""
        trainer = self.world.trainer_of(peer)
        trainer.steps.may_step = True
        self.clock.schedule(0.0, trainer.make_step)

    def training_seconds(self, peer: VirtualPeer, steps: int) -> float:
        """Return the virtual seconds since the peer's trainer started; waiting for microbatches counts."""
        return self.clock.now - self.world.started_at[name_of(peer)]

    def on_step(self, peer: VirtualPeer) -> None:
        """Count an inner step of the peer."""
        self.accounting.steps += 1
        self._count_step()

    def on_contribution(self, peer: VirtualPeer, round_number: int) -> None:
        """Begin a new ledger of the peer's server."""
        self.world.post(peer, StageContributed(round_number))

    def on_anchor(self, peer: VirtualPeer) -> None:
        """Show the peer's stage the round of its new weights."""
        self.world.post(peer, StageAnchorApplied(peer.chain.round, self.world.wall_ms))
        self.world.publish()

    def hurry(self, peer: VirtualPeer) -> None:
        """Let the peer's open step end early, because the round waits for its contribution."""
        self.world.post(peer, server_events.CloseStep())

    def on_death(self, peer: VirtualPeer) -> None:
        """Note that a peer has died."""
        super().on_death(peer)
        self.world.end(peer)


def name_of(peer: VirtualPeer) -> PeerId:
    """Return the name of a peer in the pipeline; the swarms of all stages use the same ids."""
    stage = peer.swarm.config.cut.stage
    return peer.peer_id if stage == 0 else f"{peer.peer_id} {stage}"


class PipelineWorld(StageWorld):
    """The stage processes of a run on fair links, on which nothing is lost but what dies with a peer."""

    def __init__(self, config: SimulationConfig, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.stages = config.manifest.pipeline.stages
        self.network = VirtualNetwork(clock, config.bandwidths * self.stages, config.latency)
        self.started_at: dict[PeerId, float] = {}
        self.owners: list[Owner] = []  # also those of dead peers
        self.busy_seconds = 0.0
        self._config = config
        self._peers: dict[PeerId, tuple[int, VirtualPeer]] = {}  # with the stage that it serves
        self._trainers: dict[PeerId, MicrobatchTrainer] = {}
        self._is_publishing = False

    @property
    def wall_ms(self) -> int:
        return 1 + int(1000 * self.clock.now)

    def start(self, peer: VirtualPeer, trainer: MicrobatchTrainer) -> None:
        """Let the process of a peer serve its stage."""
        stage, name = peer.swarm.config.cut.stage, name_of(peer)
        manifest = StageManifest.of(self._config.manifest, stage)
        rng = random.Random(f"murmur pipeline {manifest.run.seed} {name}")
        loop = build_stage_loop(manifest, name, 0, rng, draws=True)
        self.owners.append(loop.owner)
        self._peers[name], self._trainers[name] = (stage, peer), trainer
        self.started_at[name] = self.clock.now
        process = self.processes[name] = StageProcess(name, loop, trainer, self)
        process.post(TrainerReady(peer.chain.round, self.wall_ms))

    def trainer_of(self, peer: VirtualPeer) -> MicrobatchTrainer:
        """Return what computes for a peer."""
        return self._trainers[name_of(peer)]

    def post(self, peer: VirtualPeer, event: StageEvent) -> None:
        """Post an event to the process of a peer, if it has started."""
        process = self.find(name_of(peer))
        if process is not None:
            process.post(event)

    def end(self, peer: VirtualPeer) -> None:
        """Kill the process of a peer; the others miss it after the expiry of its record."""
        process = self.find(name_of(peer))
        if process is not None:
            process.end()
            self.clock.schedule(self._config.manifest.membership.expiry, partial(self._forget, name_of(peer)))

    def _forget(self, name: PeerId) -> None:
        del self.processes[name], self._peers[name], self._trainers[name]
        self.publish()

    # Links.

    def ask(self, sender: StageProcess, peer: PeerId, task: Task) -> None:
        def arrive() -> None:
            process = self.find(peer)
            answer = process.ask(task) if process is not None else None
            event: StageEvent = owner_events.AskFailed(peer, task, unreachable=True)
            if answer is not None:
                event = owner_events.Answered(peer, task, answer)
            self.clock.schedule(self._delay(sender, peer), partial(sender.post, event))

        self.clock.schedule(self._delay(sender, peer), arrive)

    def tell(self, sender: StageProcess, peer: PeerId, event: StageEvent, failed: StageEvent | None = None) -> None:
        def arrive() -> None:
            process = self.find(peer)
            if process is not None:
                process.post(event)
            elif failed is not None:
                sender.post(failed)

        self.clock.schedule(self._delay(sender, peer), arrive)

    def probe(self, sender: StageProcess, peer: PeerId, stage: int) -> None:
        def arrive() -> None:
            probed = owner_events.Probed(peer, stage, answers=self.find(peer) is not None)
            self.clock.schedule(self._delay(sender, peer), partial(sender.post, probed))

        self.clock.schedule(self._delay(sender, peer), arrive)

    def fetch(self, receiver: StageProcess, held: HeldBlob, arrive: Callable[[StageProcess | None], None]) -> None:
        if self.find(held.holder) is None:
            self.clock.schedule(self.network.latency, partial(arrive, None))
            return
        ends = self._slot(held.holder), self._slot(receiver.name)
        self.network.send_blob(*ends, held.blob.size, lambda: arrive(self.find(held.holder)))

    def _delay(self, sender: StageProcess, peer: PeerId) -> float:
        return OWN_CALL_SECONDS if sender.name == peer else self.network.latency

    def _slot(self, name: PeerId) -> int:
        stage, peer = self._peers[name]
        return stage * self._config.peers + peer.slot

    # Records.

    def publish(self) -> None:
        """Let all peers see the present ones a little later; changes until then share one event."""
        if not self._is_publishing:
            self._is_publishing = True
            self.clock.schedule(self.network.latency, self._show)

    def _show(self) -> None:
        self._is_publishing = False
        seen: list[list[StagePeer]] = [[] for _ in range(self.stages)]
        for name, process in self.processes.items():
            if process.loop.server is not None:
                stage, peer = self._peers[name]
                seen[stage].append(StagePeer(name, process.loop.life, peer.chain.round, process.loop.server.rate))
        event = PeersSeen(tuple(map(tuple, seen)), dict.fromkeys(self.processes, 0), StepReports(self.stages))
        for process in list(self.processes.values()):
            process.post(event)

    def on_compute(self, process: StageProcess, seconds: float) -> None:
        self.busy_seconds += seconds

    def on_report(self, process: StageProcess, action: StageAction) -> None:
        """Show nothing: the counts of the owners are in the result."""


@dataclass(frozen=True)
class PipelineResult:
    """The result of one pipelined run; `round_spread` is the largest distance of two stages in rounds."""

    result: SimulationResult
    counts: PipelineCounts
    round_spread: int


class PipelineSwarm:
    """Runs `method` on all stages of the manifest's pipeline, with the peers of `config` at each."""

    def __init__(
        self,
        config: SimulationConfig,
        method: Method,
        corpus: Corpus,
        recorder: CurveRecorder,
        on_step: Callable[[], None],
    ) -> None:
        self._config = config
        self._recorder = recorder
        self.clock = VirtualClock()
        self.world = PipelineWorld(config, self.clock)
        cuts = cuts_of(config.manifest)
        self.stages = [
            StageSwarm(replace(config, cut=cut), method, corpus, self._on_new_head, on_step, self.clock) for cut in cuts
        ]
        self._anchors: list[Tensor] = [stage.config.start_weights() for stage in self.stages]
        self._tokens = [0] * len(cuts)
        self._rounds = [0] * len(cuts)
        self._spread = 0
        for stage in self.stages:
            stage.world = self.world

    def run(self) -> None:
        """Run to the target. Raises MurmurError if a stage decides no round for too long."""
        for stage in self.stages:
            stage.start()
        self.clock.run(lambda: self._is_done or any(stage.is_stalled and not stage.is_done for stage in self.stages))
        for stage in self.stages:
            stage.require_done()

    @property
    def _is_done(self) -> bool:
        return all(stage.is_done for stage in self.stages)

    def _on_new_head(self, swarm: VirtualSwarm, peer: VirtualPeer) -> None:
        stage = swarm.config.cut.stage
        before = min(self._tokens)
        self._anchors[stage] = peer.applied_state[0].anchor
        self._tokens[stage], self._rounds[stage] = peer.chain.tokens, peer.chain.round
        self._spread = max(self._spread, max(self._rounds) - min(self._rounds))
        tokens = min(self._tokens)
        if tokens > before and self._recorder.is_due(tokens / self._config.target_tokens):
            self._recorder.record(tokens, self.clock.now, self._sent_bytes, lambda: torch.cat(self._anchors))

    @property
    def _sent_bytes(self) -> float:
        """Return the mean number of bytes that a peer has sent."""
        networks = [self.world.network, *(stage.network for stage in self.stages)]
        total = sum(sum(network.blob_bytes) + sum(network.message_bytes) for network in networks)
        return total / (self._config.peers * len(self.stages))

    def result(self, processor_seconds: float) -> PipelineResult:
        """Return the result of a run that has ended."""
        last, whole = self._recorder.curve[-1], sum(stage.numel for stage in self.stages)
        accounts = [stage.accounting for stage in self.stages]
        bits = sum(account.contribution_bits / account.steps for account in accounts) / whole
        capacity = self._config.peers * len(self.stages) * last.virtual_seconds
        messages = sum(account.contribution_bits / len(account.contributions) for account in accounts) / whole
        result = SimulationResult(
            validation_loss=last.loss,
            bits_per_parameter_step=bits,
            bits_per_parameter_sync=messages,
            virtual_seconds=last.virtual_seconds,
            compute_share=min(1.0, self.world.busy_seconds / capacity),
            rounds=len(accounts[0].commits),
            tokens=last.tokens,
            sent_bytes=self._sent_bytes,
            curve=tuple(self._recorder.curve),
            logic_seconds=sum(account.logic_seconds for account in accounts),
            processor_seconds=processor_seconds,
        )
        return PipelineResult(result, PipelineCounts.of(self.world.owners), self._spread)


def run_pipeline(
    config: SimulationConfig,
    method: Method,
    corpus: Corpus,
    evaluator: Evaluator,
    points: int,
    on_step: Callable[[], None],
) -> PipelineResult:
    """Simulate one pipelined run of one method with the manifest's seed."""
    assert config.cut == WHOLE
    started = time.process_time()
    swarm = PipelineSwarm(config, method, corpus, CurveRecorder(evaluator, points), on_step)
    swarm.run()
    return swarm.result(time.process_time() - started)

"""All stages of a pipelined run: virtual swarms with rounds of their own, on one clock, joined by microbatches."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from node.data import Corpus
from node.model import WHOLE, all_cuts
from node.simulation.config import SimulationConfig
from node.simulation.measurement import CurveRecorder, Evaluator, SimulationResult
from node.simulation.pipeline.microbatch_flow import FlowCounts, MicrobatchFlow
from node.simulation.pipeline.stage_trainer import StageTrainer
from node.simulation.pipeline.stage_worker import StageWorker
from node.simulation.swarm import VirtualSwarm
from node.simulation.virtual.network import VirtualClock
from node.simulation.virtual.peer import VirtualPeer
from optim.method import Method


class StageSwarm(VirtualSwarm):
    """The peers of one stage. They train whenever the flow has brought them the microbatches of a step."""

    flow: MicrobatchFlow

    def join_flow(self, flow: MicrobatchFlow) -> None:
        """Take microbatches from `flow`; must be called before the swarm starts."""
        self.flow = flow
        self._workers: dict[VirtualPeer, StageWorker] = {}

    def new_trainer(self, peer: VirtualPeer) -> StageTrainer:
        """Start a trainer of the stage at the peer's head."""
        trainer = StageTrainer(
            self.config.build_model(),
            self.config.manifest,
            self.planner,
            self._corpus,
            self._new_encoder(peer.slot),
            peer.peer_id,
        )
        trainer.prepare()
        trainer.start(peer.chain.round, peer.applied_state[0].shared_vectors(self.method))
        return trainer

    def begin_step(self, peer: VirtualPeer) -> None:
        """Open the peer's intake for the microbatches of an inner step."""
        if peer not in self._workers:
            self._workers[peer] = StageWorker(peer, self.config.cut.stage, self.flow)
            self.flow.add(self._workers[peer])
        self._workers[peer].open_step()

    def training_seconds(self, peer: VirtualPeer, steps: int) -> float:
        """Return the virtual seconds since the peer's first inner step began."""
        return self._workers[peer].training_seconds()

    def on_new_head(self, peer: VirtualPeer) -> None:
        """Publish a new head; a peer that has reached the target by it takes in what other stages still need."""
        super().on_new_head(peer)
        self.clock.schedule(0.0, partial(self.flow.on_room, self.config.cut.stage))

    def on_death(self, peer: VirtualPeer) -> None:
        """Note that a peer has died, and pass its tasks on."""
        super().on_death(peer)
        if peer in self._workers:
            self.flow.remove(self._workers.pop(peer))


@dataclass(frozen=True)
class PipelineResult:
    """The result of one pipelined run; `round_spread` is the largest distance of two stages in rounds."""

    result: SimulationResult
    counts: FlowCounts
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
        staleness: int = 0,
    ) -> None:
        self._config = config
        self._recorder = recorder
        self.clock = VirtualClock()
        self.flow = MicrobatchFlow(config, corpus, self.clock, staleness)
        cuts = all_cuts(config.manifest.pipeline.stages)
        self.stages = [
            StageSwarm(replace(config, cut=cut), method, corpus, self._on_new_head, on_step, self.clock) for cut in cuts
        ]
        self._anchors: list[Tensor] = [stage.config.start_weights() for stage in self.stages]
        self._tokens = [0] * len(cuts)
        self._rounds = [0] * len(cuts)
        self._spread = 0
        for stage in self.stages:
            stage.join_flow(self.flow)

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
        networks = [self.flow.network, *(stage.network for stage in self.stages)]
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
            compute_share=min(1.0, self.flow.busy_seconds / capacity),
            rounds=len(accounts[0].commits),
            tokens=last.tokens,
            sent_bytes=self._sent_bytes,
            curve=tuple(self._recorder.curve),
            logic_seconds=sum(account.logic_seconds for account in accounts),
            processor_seconds=processor_seconds,
        )
        return PipelineResult(result, self.flow.counts, self._spread)


def run_pipeline(
    config: SimulationConfig,
    method: Method,
    corpus: Corpus,
    evaluator: Evaluator,
    points: int,
    on_step: Callable[[], None],
    staleness: int = 0,
) -> PipelineResult:
    """Simulate one pipelined run of one method with the manifest's seed."""
    assert config.cut == WHOLE
    started = time.process_time()
    swarm = PipelineSwarm(config, method, corpus, CurveRecorder(evaluator, points), on_step, staleness)
    swarm.run()
    return swarm.result(time.process_time() - started)

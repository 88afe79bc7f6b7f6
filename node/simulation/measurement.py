"""What one simulated run came to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from node.data import Corpus, validation_batches
from node.from_manifest import topology_class
from node.simulation.config import SimulationConfig
from node.simulation.swarm import VirtualSwarm
from node.simulation.virtual_peer import VirtualPeer
from node.trainer.inner_step import validation_loss

VALIDATION_TOKENS = 16_384


@dataclass(frozen=True)
class CurvePoint:
    """Of a curve: what had been spent by then. `sent_bytes` a peer."""

    tokens: int
    virtual_seconds: float
    sent_bytes: float
    loss: float


@dataclass(frozen=True)
class SimulationResult:
    """`bits_per_parameter_sync`: of one message as it was encoded; `bits_per_parameter_step`: spread over the inner
    steps. `sent_bytes`: everything a peer sent on average (messages, sums, states, statements). `compute_share`: of
    the virtual time, how much the peers computed. `logic_seconds`: of the processor's time, what went
    into the round machines."""

    validation_loss: float
    bits_per_parameter_step: float
    bits_per_parameter_sync: float
    virtual_seconds: float
    compute_share: float
    rounds: int
    tokens: int
    sent_bytes: float
    curve: tuple[CurvePoint, ...] = ()
    logic_seconds: float = field(default=0.0, compare=False)
    processor_seconds: float = field(default=0.0, compare=False)


class Evaluator:
    """Measures weights on the held-out text."""

    def __init__(self, config: SimulationConfig, corpus: Corpus) -> None:
        self._model = config.build_model()
        self._batches = validation_batches(corpus, config.manifest.model.context, VALIDATION_TOKENS)

    def loss(self, flat: Tensor) -> float:
        return validation_loss(self._model, flat, self._batches)[0]


class CurveRecorder:
    """Takes a point of the curve whenever another share of the tokens is done, and always at the end."""

    def __init__(self, evaluator: Evaluator, points: int) -> None:
        self._evaluator = evaluator
        self._points = points
        self.curve: list[CurvePoint] = []
        self._next_point = 1

    def is_due(self, done_fraction: float) -> bool:
        """`done`: the share of the run, 0 to 1."""
        if done_fraction < 1 and done_fraction * self._points < self._next_point:
            return False
        self._next_point = int(done_fraction * self._points) + 1
        return True

    def on_new_head(self, swarm: VirtualSwarm, peer: VirtualPeer) -> None:
        tokens = peer.chain.tokens
        if self.is_due(tokens / swarm.config.target_tokens):
            self.record(tokens, swarm.clock.now, mean_sent_bytes(swarm), lambda: agreed_weights(swarm, peer))

    def record(self, tokens: int, seconds: float, sent: float, weights: Callable[[], Tensor]) -> None:
        self.curve.append(CurvePoint(tokens, seconds, sent, self._evaluator.loss(weights())))


def agreed_weights(swarm: VirtualSwarm, peer: VirtualPeer) -> Tensor:
    """The anchor; where each peer has its own, their mean."""
    if topology_class(swarm.method).has_shared_state:
        return peer.applied_state[0].anchor
    anchors = [other.applied_state[0].anchor for other in swarm.live_peers]
    return torch.stack(anchors).mean(0)


def mean_sent_bytes(swarm: VirtualSwarm) -> float:
    """A peer's, on average."""
    return (sum(swarm.network.blob_bytes) + sum(swarm.network.message_bytes)) / swarm.config.peers


def compute_result(swarm: VirtualSwarm, recorder: CurveRecorder, processor_seconds: float) -> SimulationResult:
    ledger, setting = swarm.accounting, swarm.config
    last = recorder.curve[-1]
    capacity = setting.peers * last.virtual_seconds
    return SimulationResult(
        validation_loss=last.loss,
        bits_per_parameter_step=ledger.contribution_bits / swarm.numel / ledger.steps,
        bits_per_parameter_sync=ledger.contribution_bits / swarm.numel / len(ledger.contributions),
        virtual_seconds=last.virtual_seconds,
        compute_share=min(1.0, sum(ledger.busy_seconds.values()) / capacity),
        rounds=len(ledger.commits),
        tokens=last.tokens,
        sent_bytes=mean_sent_bytes(swarm),
        curve=tuple(recorder.curve),
        logic_seconds=ledger.logic_seconds,
        processor_seconds=processor_seconds,
    )


def interpolate_loss(curve: tuple[CurvePoint, ...], seconds: float) -> float | None:
    """On a line between the points; None before the first. After the last, the last."""
    if not curve or seconds < curve[0].virtual_seconds:
        return None
    for before, after in pairwise(curve):
        if before.virtual_seconds <= seconds < after.virtual_seconds:
            share = (seconds - before.virtual_seconds) / (after.virtual_seconds - before.virtual_seconds)
            return before.loss + share * (after.loss - before.loss)
    return curve[-1].loss

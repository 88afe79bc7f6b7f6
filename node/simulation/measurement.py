"""Measure one simulated run: its result, its loss curve, and the evaluation of weights."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from node.data import Corpus, validation_sets
from node.data.batches import VALIDATION_TOKENS
from node.from_manifest import topology_class
from node.simulation.config import SimulationConfig
from node.simulation.swarm import VirtualSwarm
from node.simulation.virtual.peer import VirtualPeer
from node.trainer.inner_step import validate


@dataclass(frozen=True)
class CurvePoint:
    """A point of the loss curve, with the costs up to it; `sent_bytes` is the mean per peer."""

    tokens: int
    virtual_seconds: float
    sent_bytes: float
    loss: float


@dataclass(frozen=True)
class SimulationResult:
    """The result of one simulated run.

    Attributes:
        bits_per_parameter_sync: bits of one encoded contribution.
        bits_per_parameter_step: the same, spread over its inner steps.
        sent_bytes: all bytes that a peer sent on average (contributions, sums, states, messages).
        compute_share: fraction of the virtual time in which the peers computed.
        logic_seconds: CPU time of the round machines.
        processor_seconds: CPU time of the whole run.
    """

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
        self._held_out = validation_sets(corpus, config.manifest.model.context, VALIDATION_TOKENS)

    def loss(self, flat: Tensor) -> float:
        """Return the validation loss of flat weights in nats per token."""
        return validate(self._model, flat, self._held_out).loss


class CurveRecorder:
    """Records `points` points of the curve at equal distances in tokens, and always the last one."""

    def __init__(self, evaluator: Evaluator, points: int) -> None:
        self._evaluator = evaluator
        self._points = points
        self.curve: list[CurvePoint] = []
        self._next_point = 1

    def is_due(self, done_fraction: float) -> bool:
        """Return whether a point is due at this fraction of the run, 0 to 1."""
        if done_fraction < 1 and done_fraction * self._points < self._next_point:
            return False
        self._next_point = int(done_fraction * self._points) + 1
        return True

    def on_new_head(self, swarm: VirtualSwarm, peer: VirtualPeer) -> None:
        """Record a point if one is due at the new head of `peer`."""
        tokens = peer.chain.tokens
        if self.is_due(tokens / swarm.config.target_tokens):
            self.record(tokens, swarm.clock.now, mean_sent_bytes(swarm), lambda: agreed_weights(swarm, peer))

    def record(self, tokens: int, seconds: float, sent: float, weights: Callable[[], Tensor]) -> None:
        """Evaluate the weights and record a point."""
        self.curve.append(CurvePoint(tokens, seconds, sent, self._evaluator.loss(weights())))


def agreed_weights(swarm: VirtualSwarm, peer: VirtualPeer) -> Tensor:
    """Return the anchor, or the mean of the anchors if each peer has its own."""
    if topology_class(swarm.method).has_shared_state:
        return peer.applied_state[0].anchor
    anchors = [other.applied_state[0].anchor for other in swarm.live_peers]
    return torch.stack(anchors).mean(0)


def mean_sent_bytes(swarm: VirtualSwarm) -> float:
    """Return the mean number of bytes that a peer has sent."""
    return (sum(swarm.network.blob_bytes) + sum(swarm.network.message_bytes)) / swarm.config.peers


def compute_result(swarm: VirtualSwarm, recorder: CurveRecorder, processor_seconds: float) -> SimulationResult:
    """Compute the result from the swarm's accounts and the recorded curve."""
    accounting = swarm.accounting
    last = recorder.curve[-1]
    capacity = swarm.config.peers * last.virtual_seconds
    return SimulationResult(
        validation_loss=last.loss,
        bits_per_parameter_step=accounting.contribution_bits / swarm.numel / accounting.steps,
        bits_per_parameter_sync=accounting.contribution_bits / swarm.numel / len(accounting.contributions),
        virtual_seconds=last.virtual_seconds,
        compute_share=min(1.0, sum(accounting.busy_seconds.values()) / capacity),
        rounds=len(accounting.commits),
        tokens=last.tokens,
        sent_bytes=mean_sent_bytes(swarm),
        curve=tuple(recorder.curve),
        logic_seconds=accounting.logic_seconds,
        processor_seconds=processor_seconds,
    )


def interpolate_loss(curve: tuple[CurvePoint, ...], seconds: float) -> float | None:
    """Return the loss at a time, linear between the points; `None` before the first, the last loss after the last."""
    if not curve or seconds < curve[0].virtual_seconds:
        return None
    for before, after in pairwise(curve):
        if before.virtual_seconds <= seconds < after.virtual_seconds:
            fraction = (seconds - before.virtual_seconds) / (after.virtual_seconds - before.virtual_seconds)
            return before.loss + fraction * (after.loss - before.loss)
    return curve[-1].loss

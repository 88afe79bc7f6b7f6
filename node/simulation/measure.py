"""What one simulated run came to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from node.data import Corpus, validation_batches
from node.simulation.peer import VirtualPeer
from node.simulation.setting import Setting
from node.simulation.swarm import Swarm
from node.trainer.inner_step import validation_loss

VALIDATION_TOKENS = 16_384


@dataclass(frozen=True)
class Point:
    """Of a curve: what had been spent by then. `sent_bytes` a peer."""

    tokens: int
    virtual_seconds: float
    sent_bytes: float
    loss: float


@dataclass(frozen=True)
class Outcome:
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
    curve: tuple[Point, ...] = ()
    logic_seconds: float = field(default=0.0, compare=False)
    processor_seconds: float = field(default=0.0, compare=False)


class Examiner:
    """Measures weights on the held-out text."""

    def __init__(self, setting: Setting, corpus: Corpus) -> None:
        self._model = setting.model()
        self._batches = validation_batches(corpus, setting.manifest.model.context, VALIDATION_TOKENS)

    def loss(self, flat: Tensor) -> float:
        return validation_loss(self._model, flat, self._batches)[0]


class Recorder:
    """Takes a point of the curve whenever another share of the tokens is done, and always at the end."""

    def __init__(self, examiner: Examiner, points: int) -> None:
        self._examiner = examiner
        self._points = points
        self.curve: list[Point] = []
        self._next_share = 1

    def is_due(self, done: float) -> bool:
        """`done`: the share of the run, 0 to 1."""
        if done < 1 and done * self._points < self._next_share:
            return False
        self._next_share = int(done * self._points) + 1
        return True

    def reached(self, swarm: Swarm, peer: VirtualPeer) -> None:
        tokens = peer.chain.tokens
        if self.is_due(tokens / swarm.setting.target_tokens):
            self.record(tokens, swarm.clock.now, sent_bytes(swarm), lambda: agreed_weights(swarm, peer))

    def record(self, tokens: int, seconds: float, sent: float, weights: Callable[[], Tensor]) -> None:
        self.curve.append(Point(tokens, seconds, sent, self._examiner.loss(weights())))


def agreed_weights(swarm: Swarm, peer: VirtualPeer) -> Tensor:
    """The anchor; where each peer has its own, their mean."""
    if swarm.method.topology.kind != "groups":
        return peer.applied[0].anchor
    anchors = [other.applied[0].anchor for other in swarm.alive]
    return torch.stack(anchors).mean(0)


def sent_bytes(swarm: Swarm) -> float:
    """A peer's, on average."""
    return (sum(swarm.links.blob_bytes) + sum(swarm.links.statement_bytes)) / swarm.setting.peers


def outcome(swarm: Swarm, recorder: Recorder, processor_seconds: float) -> Outcome:
    ledger, setting = swarm.ledger, swarm.setting
    last = recorder.curve[-1]
    capacity = setting.peers * last.virtual_seconds
    return Outcome(
        validation_loss=last.loss,
        bits_per_parameter_step=ledger.message_bits / swarm.numel / ledger.steps,
        bits_per_parameter_sync=ledger.message_bits / swarm.numel / len(ledger.entries),
        virtual_seconds=last.virtual_seconds,
        compute_share=min(1.0, sum(ledger.busy_seconds.values()) / capacity),
        rounds=len(ledger.commits),
        tokens=last.tokens,
        sent_bytes=sent_bytes(swarm),
        curve=tuple(recorder.curve),
        logic_seconds=ledger.logic_seconds,
        processor_seconds=processor_seconds,
    )


def loss_at(curve: tuple[Point, ...], seconds: float) -> float | None:
    """On a line between the points; None before the first. After the last, the last."""
    if not curve or seconds < curve[0].virtual_seconds:
        return None
    for before, after in pairwise(curve):
        if before.virtual_seconds <= seconds < after.virtual_seconds:
            share = (seconds - before.virtual_seconds) / (after.virtual_seconds - before.virtual_seconds)
            return before.loss + share * (after.loss - before.loss)
    return curve[-1].loss

"""A trainer's own state, and what a message and an adoption do to it.

    delta     = reference - weights                 local progress since `reference`; points uphill
    message:    x = residual * decay + delta;  send C(x);  residual <- x - D(C(x));  reference <- weights
    adoption:   residual <- residual + D(message)   only when the outstanding message was excluded
                weights <- anchor + (weights - reference);  reference <- anchor

So what was trained after the message was sent lives on across the adoption, and nothing is lost when a message misses
its round (arXiv 1901.09847): what is applied plus the residual plus (reference - weights) adds up to all progress.
"""

from collections.abc import Sequence
from typing import Self

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt
from torch import Tensor

from node.arena import Arena
from node.channel import Activity, Fate, Message
from node.model import Llama
from node.trainer.inner import InnerOptimizer
from optim.method import Sender


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Work(_Record):
    """What was trained in some stretch of steps; `loss` is the sum of the steps' losses, in nats."""

    tokens: NonNegativeInt = 0
    steps: NonNegativeInt = 0
    loss: NonNegativeFloat = 0.0

    def __add__(self, other: Self) -> "Work":
        return Work(tokens=self.tokens + other.tokens, steps=self.steps + other.steps, loss=self.loss + other.loss)

    @property
    def mean_loss(self) -> float:
        return self.loss / max(1, self.steps)


class Outstanding(_Record):
    """A message whose fate is not known; its parts lie in the outbox. `work` counts from the last included one."""

    round: NonNegativeInt
    sizes: tuple[NonNegativeInt, ...]
    work: Work

    def message(self) -> Message:
        work = self.work
        return Message(round=self.round, sizes=self.sizes, tokens=work.tokens, steps=work.steps, loss=work.mean_loss)


class Counters(_Record):
    """Everything of a trainer's state that is no tensor: the meta data of a snapshot."""

    step: NonNegativeInt = 0
    tokens: NonNegativeInt = 0
    round: NonNegativeInt = 0
    position: NonNegativeInt = 0
    skipped: NonNegativeInt = 0
    since_message: Work = Work()
    unreported: Work = Work()  # of messages that were excluded
    outstanding: Outstanding | None = None
    seconds: dict[Activity, float] = {}


class InnerState:
    """Weights and moments on the model's device; `reference` and `residual` flat fp32 on the CPU."""

    def __init__(self, model: Llama, optimizer: InnerOptimizer, sender: Sender, arena: Arena) -> None:
        self._model = model
        self._optimizer = optimizer
        self._sender = sender
        self._arena = arena
        self.reference = torch.zeros(arena.numel)
        self.residual = torch.zeros(arena.numel)
        self.counters = Counters()

    def start(self, round_number: int) -> None:
        """Begin at the anchor of that round, with nothing trained."""
        self.reference.copy_(self._arena.anchor(round_number))
        self._model.load_flat(self.reference)
        self.counters = Counters(round=round_number)

    def restore(self) -> bool:
        """Take the newest snapshot; False when there is none."""
        snapshot = self._arena.read_snapshot()
        if snapshot is None:
            return False
        self.counters = Counters.model_validate(snapshot.meta)
        for name, tensor in self._vectors().items():
            tensor.copy_(snapshot.vectors[name])
        return True

    def save(self) -> None:
        self._arena.write_snapshot(self._vectors(), self.counters.model_dump(mode="json"))

    def message(self) -> Message:
        """Encode the progress since the reference into the outbox. Nothing may be outstanding."""
        counters = self.counters
        if counters.outstanding is not None:
            raise ValueError("the message before this one is still on its way")
        weights = self._weights()
        parts = self._sender.message(self.reference - weights, self.residual)
        self._fill_outbox(parts)
        self.reference.copy_(weights)
        outstanding = Outstanding(
            round=counters.round,
            sizes=tuple(len(part) for part in parts),
            work=counters.unreported + counters.since_message,
        )
        self.update(outstanding=outstanding, since_message=Work(), unreported=Work())
        return outstanding.message()

    def adopt(self, round_number: int, fate: Fate) -> None:
        """Go over to the anchor of that round, taking along what was trained since the reference."""
        outstanding = self.counters.outstanding
        decided = outstanding is not None and fate != "none"
        if round_number == self.counters.round and outstanding is None:
            return  # said twice, around a restart; x + (y - x) would only add rounding errors
        if outstanding is not None and fate == "excluded":
            self._sender.take_back(self._outbox_parts(outstanding.sizes), self.residual)
            self.update(unreported=outstanding.work)
        anchor = self._arena.anchor(round_number)
        self._model.load_flat(anchor + (self._weights() - self.reference))
        self.reference.copy_(anchor)
        self.update(round=round_number, outstanding=None if decided else outstanding)

    def count_step(self, tokens: int, loss: float, position: int) -> None:
        counters = self.counters
        self.update(
            step=counters.step + 1,
            tokens=counters.tokens + tokens,
            position=position,
            since_message=counters.since_message + Work(tokens=tokens, steps=1, loss=loss),
        )

    def update(self, **values: object) -> None:
        self.counters = self.counters.model_copy(update=values)

    def _weights(self) -> Tensor:
        return self._model.flat.detach().cpu()

    def _vectors(self) -> dict[str, Tensor]:
        return {
            "weights": self._model.flat.detach(),
            "first_moment": self._optimizer.first_moment,
            "second_moment": self._optimizer.second_moment,
            "residual": self.residual,
            "reference": self.reference,
        }

    def _fill_outbox(self, parts: Sequence[bytes]) -> None:
        payload = b"".join(parts)
        if len(payload) > self._arena.outbox_bytes:
            raise ValueError(f"a message of {len(payload)} bytes; the outbox holds {self._arena.outbox_bytes}")
        self._arena.outbox[: len(payload)] = payload

    def _outbox_parts(self, sizes: Sequence[int]) -> list[bytes]:
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        outbox = self._arena.outbox
        return [bytes(outbox[end - size : end]) for end, size in zip(ends, sizes, strict=True)]

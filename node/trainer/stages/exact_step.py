"""The sum of an exact step at one trainer: gradients of microbatches in fp64, and the ledger of those that it contains.

A microbatch is added and taken away by its own gradient, never merged with another one, so the sum does not depend on
the order. It lives in this process only: a trainer that dies loses it, and others compute its microbatches again.
"""

import torch
from torch import Tensor

from optim.codecs.base import Payload
from optim.exact import Doubles, Float64Sum
from protocol.errors import MalformedError
from protocol.pipeline.exact.ledger import StepLedger

EXACT_READER = "exact"  # whose order of the text all trainers read, in place of their own


class ExactStep:
    """The open step of `count` microbatches, at a model with `numel` parameters."""

    def __init__(self, count: int, numel: int, device: torch.device) -> None:
        self.round = 0
        self.ledger = StepLedger(count)
        self._total = torch.zeros(numel, dtype=torch.float64, device=device)
        self._losses: dict[int, float] = {}

    @property
    def mean_loss(self) -> float:
        """Return the mean loss of the microbatches that count here, as far as it is known."""
        return sum(self._losses.values()) / max(1, len(self._losses))

    @property
    def total(self) -> Doubles:
        """Return the sum, in its own memory on a CPU."""
        return self._total.cpu().numpy()

    def begin(self, round_number: int) -> None:
        """Drop everything, because the weights are others or the step is made again."""
        self.round = round_number
        self.ledger = StepLedger(self.ledger.count)
        self._losses.clear()
        self._total.zero_()

    def add(self, number: int, gradient: Tensor, loss: float | None) -> None:
        """Add the gradient of a microbatch. Raises MalformedError if the sum has it."""
        if number in self.ledger:
            raise MalformedError(f"the daemon adds microbatch {number} of an exact step twice")
        self._total += gradient
        self.ledger |= StepLedger.of(self.ledger.count, (number,))
        self._losses[number] = loss or 0.0

    def take_away(self, number: int, gradient: Tensor) -> None:
        """Subtract the gradient of a microbatch. Raises MalformedError if the sum does not have it."""
        if number not in self.ledger:
            raise MalformedError(f"the daemon takes microbatch {number} out of an exact step that lacks it")
        self._total -= gradient
        self.ledger -= StepLedger.of(self.ledger.count, (number,))
        del self._losses[number]

    def encode(self, codec: Float64Sum) -> Payload:
        """Return the payload of a contribution."""
        return codec.encode_sum(self.total) if len(self.ledger) else codec.encode_nothing()

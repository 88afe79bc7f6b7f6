"""Score tokens with a model: the log probability of each, and whether it was the most likely one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from node.model.interface import LanguageModel
from node.trainer.devices.device import autocast_context
from protocol.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class TokenScores:
    """The scores of the targets of a batch: log probabilities in nats, and whether each was the most likely; (B, T)."""

    log_probabilities: Tensor
    is_likeliest: Tensor


class Scorer:
    """A model on a device that scores up to `batch` sequences at a time."""

    def __init__(self, model: LanguageModel, batch: int) -> None:
        self.model = model
        self._batch = batch

    @property
    def context(self) -> int:
        """Return the most tokens that the model reads at a time."""
        return self.model.config.context

    @torch.no_grad()
    def score(self, windows: Tensor) -> TokenScores:
        """Score windows (B, T + 1): each token but the first is a target, after those before it."""
        parts = [self._score_batch(piece) for piece in torch.split(windows, self._batch)]
        return TokenScores(
            torch.cat([part.log_probabilities for part in parts]), torch.cat([part.is_likeliest for part in parts])
        )

    def score_continuations(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[float, bool]]:
        """Yield for each (context, continuation) the log probability, and whether it is the likeliest continuation.

        A long context loses its beginning. Both are at least one token, and the continuation at most `context`.
        """
        order = sorted(range(len(pairs)), key=lambda index: -sum(map(len, pairs[index])))  # equal lengths together
        scored: dict[int, tuple[float, bool]] = {}
        for start in range(0, len(order), self._batch):
            group = order[start : start + self._batch]
            rows = [(pairs[index][0] + pairs[index][1])[-self.context - 1 :] for index in group]
            width = max(map(len, rows))
            padded = torch.tensor([row + [0] * (width - len(row)) for row in rows])  # a later token changes nothing
            scores = self.score(padded)
            for place, index in enumerate(group):
                end = len(rows[place]) - 1
                chosen = slice(end - len(pairs[index][1]), end)
                total = float(scores.log_probabilities[place, chosen].sum())
                scored[index] = total, bool(scores.is_likeliest[place, chosen].all())
        return (scored[index] for index in range(len(pairs)))

    def _score_batch(self, windows: Tensor) -> TokenScores:
        device = self.model.flat.device
        windows = windows.to(device)
        with autocast_context(device):
            logits = self.model(windows[:, :-1])
        found, likeliest = torch.empty(windows[:, 1:].shape), torch.empty(windows[:, 1:].shape, dtype=torch.bool)
        for row in range(len(windows)):  # one sequence's logits in fp32 at a time
            known, targets = logits[row].float(), windows[row, 1:]
            found[row] = known.gather(-1, targets[:, None])[:, 0] - known.logsumexp(-1)
            likeliest[row] = known.argmax(-1) == targets
        if not torch.isfinite(found).all():
            raise CheckpointError("the model's output is not finite: its training diverged; use another checkpoint")
        return TokenScores(found, likeliest)

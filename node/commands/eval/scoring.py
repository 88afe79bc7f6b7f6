"""Score a model: on continuations of tasks, and on the held-out text of a run (loss, perplexity and bits a byte).

The windows of text are those of the loss that nodes measure while they train. The standard error is that of the mean
over windows.
"""

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from node.data import HeldOut, open_corpus, validation_sets
from node.data.batches import VALIDATION_TOKENS
from node.data.corpus import UNCOUNTED
from node.data.tokenizer import ByteTokenizer, TextTokenizer
from node.model.interface import LanguageModel
from node.model.opened_model import OpenedModel
from node.trainer.devices.device import autocast_context
from protocol.errors import CheckpointError, UsageError
from protocol.manifest.run import Manifest

VALIDATION: Final = "validation"


class Score(NamedTuple):
    """A metric of a model on a task."""

    task: str
    metric: str
    value: float
    standard_error: float | None
    samples: int | None


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


def evaluate_validation(
    opened: OpenedModel, scorer: Scorer, manifest: Manifest, base: Path, windows: int | None
) -> list[Score]:
    """Return the scores of a model on the held-out text of a manifest, whose paths start at `base`.

    Args:
        windows: the most windows of text; `None` means as many as nodes measure.

    Raises DataError or MissingFileError if the text is not here.
    """
    context = opened.config.context
    tokens = VALIDATION_TOKENS if windows is None else windows * context
    corpus = open_corpus(manifest.data, base, manifest.method.modules)
    if corpus.vocabulary_size > opened.config.vocabulary:
        raise UsageError(
            f"the text has {corpus.vocabulary_size} token ids, the model only {opened.config.vocabulary}; "
            "name the manifest of the model's own run (--data)"
        )
    held_out = validation_sets(corpus, context, tokens)
    measured = [_measure(held, scorer, opened.tokenizer) for held in held_out]
    whole = _mix(measured, [held.weight for held in held_out])
    by_source = zip(held_out, measured, strict=True) if len(measured) > 1 else ()
    named = [(VALIDATION, whole), *((f"{VALIDATION}.{held.name}", of_source) for held, of_source in by_source)]
    return [score for name, found in named for score in found.scores(name)]


@dataclass(frozen=True)
class _Measured:
    """The mean loss of windows in nats per token, and its standard error; `size` is the bytes of text of a token."""

    loss: float
    error: float | None
    size: float
    windows: int

    def scores(self, name: str) -> Iterator[Score]:
        bits, perplexity = 1 / (math.log(2) * self.size) if self.size else math.nan, math.exp(min(self.loss, 700.0))
        for metric, value, slope in (
            ("loss", self.loss, 1.0),
            ("perplexity", perplexity, perplexity),
            ("bits_per_byte", self.loss * bits, bits),
        ):
            yield Score(name, metric, value, None if self.error is None else self.error * slope, self.windows)


def _measure(held: HeldOut, scorer: Scorer, tokenizer: TextTokenizer) -> _Measured:
    windows = torch.cat(held.batches)
    windows = windows[(windows[:, 1:] < UNCOUNTED).any(dim=-1)]  # of conversations, those with an answer
    counted, tokens = (windows[:, 1:] < UNCOUNTED).double(), windows & (UNCOUNTED - 1)
    counts = counted.sum(-1)
    losses = -(scorer.score(tokens).log_probabilities.double() * counted).sum(-1) / counts  # of each window
    size = count_bytes(tokenizer, tokens) / tokens[:, 1:].numel()
    return _Measured(float(losses @ counts / counts.sum()), standard_error(losses), size, len(windows))


def _mix(measured: Sequence[_Measured], weights: Sequence[float]) -> _Measured:
    """Return the means over a mixture."""
    shares = [weight / sum(weights) for weight in weights]

    def mean(values: Iterable[float]) -> float:
        return sum(share * value for share, value in zip(shares, values, strict=True))

    errors = [found.error for found in measured]
    known = [error for error in errors if error is not None]
    return _Measured(
        loss=mean(found.loss for found in measured),
        error=math.hypot(*map(operator.mul, shares, known)) if len(known) == len(errors) else None,
        size=mean(found.size for found in measured),
        windows=sum(found.windows for found in measured),
    )


def standard_error(values: Tensor) -> float | None:
    """Return the standard error of the mean of values (N,); `None` for a single one."""
    return float(values.std(correction=1)) / math.sqrt(len(values)) if len(values) > 1 else None


def count_bytes(tokenizer: TextTokenizer, windows: Tensor) -> int:
    """Return the bytes of text of the targets of windows (N, T + 1); tokens with a role are no text."""
    if isinstance(tokenizer, ByteTokenizer):
        return windows[:, 1:].numel()
    roles = {token.id for token in tokenizer.special_tokens.values()}
    total = 0
    for first, *ids in windows.tolist():
        text = tokenizer.decode((token for token in ids if token not in roles), after=[first])
        total += sum(len(piece.encode()) for piece in text)
    return total

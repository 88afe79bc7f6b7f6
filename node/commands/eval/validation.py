"""Evaluate a model on the held-out text of a run: loss, perplexity and bits a byte.

The windows are those of the loss that nodes measure while they train. The standard error is that of the mean over
windows.
"""

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from node.commands.eval.scoring import Scorer
from node.commands.eval.tasks import Score
from node.data import HeldOut, open_corpus, validation_sets
from node.data.batches import VALIDATION_TOKENS
from node.data.tokenizer import ByteTokenizer, TextTokenizer
from node.model.opened_model import OpenedModel
from protocol.errors import UsageError
from protocol.manifest.run import Manifest

VALIDATION: Final = "validation"


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
    corpus = open_corpus(manifest.data, base)
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
    losses = -scorer.score(windows).log_probabilities.double().mean(-1)  # of each window
    size = count_bytes(tokenizer, windows) / windows[:, 1:].numel()
    return _Measured(float(losses.mean()), standard_error(losses), size, len(windows))


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

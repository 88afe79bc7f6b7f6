"""Measure the validation loss of weights on each source of text, and on their mixture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from node.data import HeldOut
from node.model import LanguageModel
from node.trainer.inner_step import validation_loss


@dataclass(frozen=True)
class Validation:
    """A mean loss in nats per token, the number of tokens, and the losses of the sources of a mixture by name."""

    loss: float
    tokens: int
    by_source: Mapping[str, float] = field(default_factory=dict)


def validate(model: LanguageModel, flat: Tensor, held_out: Sequence[HeldOut]) -> Validation:
    """Measure the weights `flat` (numel,) on each source."""
    return combine_sources(held_out, [validation_loss(model, flat, held.batches) for held in held_out])


def combine_sources(held_out: Sequence[HeldOut], measured: Sequence[tuple[float, int]]) -> Validation:
    """Return the result of losses and tokens by source; the loss of a mixture is their mean by weights."""
    pairs = [(held, loss) for held, (loss, _) in zip(held_out, measured, strict=True)]
    return Validation(
        loss=sum(held.weight * loss for held, loss in pairs) / sum(held.weight for held in held_out),
        tokens=sum(tokens for _, tokens in measured),
        by_source={held.name: loss for held, loss in pairs} if len(pairs) > 1 else {},
    )

"""One inner step's gradient, and the validation loss: what the trainer and the simulator do alike with the model."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from node.model import Llama
from node.trainer.device import autocast_context


def accumulate_gradient(model: Llama, windows: Tensor, microbatch: int, at_weights: Tensor | None = None) -> float:
    """Adds the gradient of the mean loss over `windows` (sequences, context + 1) to `model.flat.grad`, a few at a time.

    `place`: weights at which it is taken instead of the model's, which are left as they were. Returns that loss, in
    nats a token.
    """
    if at_weights is not None:
        with _loaded_weights(model, at_weights):
            return accumulate_gradient(model, windows, microbatch)
    device = model.flat.device
    total = torch.zeros((), device=device)
    for piece in torch.split(windows.to(device), microbatch):
        with autocast_context(device):
            loss = model(piece[:, :-1], piece[:, 1:]) * (len(piece) / len(windows))
        loss.backward()
        total += loss.detach()
    return float(total)


@torch.no_grad()
def validation_loss(model: Llama, flat: Tensor, batches: Iterable[Tensor]) -> tuple[float, int]:
    """Mean loss in nats a token of the weights `flat`, and the tokens it was taken over; `model` is left as it was."""
    device = model.flat.device
    total, tokens = 0.0, 0
    with _loaded_weights(model, flat):
        for windows in batches:
            piece = windows.to(device)
            with autocast_context(device):
                loss = model(piece[:, :-1], piece[:, 1:])
            counted = len(piece) * (piece.shape[1] - 1)
            total, tokens = total + float(loss) * counted, tokens + counted
    return total / tokens, tokens


@contextmanager
def _loaded_weights(model: Llama, flat: Tensor) -> Iterator[None]:
    """The model has these weights while inside, and its own again afterwards."""
    own = model.flat.detach().clone()
    model.load_flat(flat)
    try:
        yield
    finally:
        model.load_flat(own)

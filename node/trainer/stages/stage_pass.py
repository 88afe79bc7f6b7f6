"""The forward and backward passes of one pipeline stage for one microbatch.

A forward pass keeps no graph. The backward pass runs the forward pass again from the same input, so a stage holds its
inputs instead of all activations, and a peer that did not run the forward pass may run the backward pass. At the same
weights the gradient is bit-equal to that of a single pass with its graph.

Letters in comments: B sequences, T tokens, S values of the stream (`model.stream_width`).
"""

import torch
from torch import Tensor

from node.model import LanguageModel
from node.trainer.devices.device import autocast_context


@torch.no_grad()
def forward_stage(model: LanguageModel, inputs: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Return the residual stream (B, T, S) after a stage before the last.

    Args:
        model: the stage, of any device.
        inputs: token ids (B, T) at the first stage, else the stream (B, T, S).
        tokens: token ids, for a later stage of a model with a subspace.
    """
    device = model.flat.device
    with autocast_context(device):
        output: Tensor = model(inputs.to(device), None, _to(device, tokens))
    return output


def backward_stage(
    model: LanguageModel, inputs: Tensor, output_gradient: Tensor, tokens: Tensor | None = None, weight: float = 1.0
) -> Tensor | None:
    """Add a microbatch's gradient to the model's; return the gradient of the inputs, `None` at the first stage.

    `weight` is the one that the last stage gave the microbatch; the stage's own losses have it too.
    """
    leaf = _leaf(model, inputs)
    with autocast_context(leaf.device):
        output: Tensor = model(leaf, None, _to(leaf.device, tokens))
    model.attach_gradient()
    roots, gradients = [output], [output_gradient.to(output)]
    if (extra := model.take_auxiliary_loss()) is not None:
        roots, gradients = [*roots, extra], [*gradients, torch.full_like(extra, weight)]
    torch.autograd.backward(roots, gradients)
    return leaf.grad


def finish_microbatch(
    model: LanguageModel, inputs: Tensor, targets: Tensor, weight: float, tokens: Tensor | None = None
) -> tuple[float, Tensor | None]:
    """Run both passes of the last stage; return the loss in nats per token and the gradient of the inputs.

    Args:
        model: the last stage, to whose gradient that of `weight` times the loss is added.
        inputs: the stream (B, T, S), or token ids if there is one stage only.
        targets: (B, T) int64.
        weight: the microbatch's share of its batch.
        tokens: token ids, for a model with a subspace.
    """
    leaf = _leaf(model, inputs)
    with autocast_context(leaf.device):
        loss: Tensor = model(leaf, targets.to(leaf.device), _to(leaf.device, tokens))
    model.attach_gradient()
    torch.autograd.backward(loss * weight)
    return float(loss.detach()), leaf.grad


def _to(device: torch.device, tokens: Tensor | None) -> Tensor | None:
    return None if tokens is None else tokens.to(device)


def _leaf(model: LanguageModel, inputs: Tensor) -> Tensor:
    """Return the inputs on the model's device, detached; a stream gets a gradient, token ids have none."""
    leaf = inputs.detach().to(model.flat.device)
    return leaf if model.cut.has_embedding else leaf.requires_grad_()

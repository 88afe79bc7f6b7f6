"""The forward and backward passes of one pipeline stage for one microbatch.

A forward pass keeps no graph. The backward pass runs the forward pass again from the same input, so a stage holds its
inputs instead of all activations, and a peer that did not run the forward pass may run the backward pass. At the same
weights the gradient is bit-equal to that of a single pass with its graph.

Letters in comments: B sequences, T tokens, W width.
"""

import torch
from torch import Tensor

from node.model import LanguageModel
from node.trainer.device import autocast_context


@torch.no_grad()
def forward_stage(model: LanguageModel, inputs: Tensor) -> Tensor:
    """Return the residual stream (B, T, W) after a stage before the last.

    Args:
        model: the stage, of any device.
        inputs: token ids (B, T) at the first stage, else the stream (B, T, W).
    """
    device = model.flat.device
    with autocast_context(device):
        output: Tensor = model(inputs.to(device))
    return output


def backward_stage(model: LanguageModel, inputs: Tensor, output_gradient: Tensor) -> Tensor | None:
    """Add a microbatch's gradient to the model's; return the gradient of the inputs, `None` at the first stage."""
    leaf = _leaf(model, inputs)
    with autocast_context(leaf.device):
        output: Tensor = model(leaf)
    model.attach_gradient()
    torch.autograd.backward(output, output_gradient.to(output))
    return leaf.grad


def finish_microbatch(
    model: LanguageModel, inputs: Tensor, targets: Tensor, weight: float
) -> tuple[float, Tensor | None]:
    """Run both passes of the last stage; return the loss in nats per token and the gradient of the inputs.

    Args:
        model: the last stage, to whose gradient that of `weight` times the loss is added.
        inputs: the stream (B, T, W), or token ids if there is one stage only.
        targets: (B, T) int64.
        weight: the microbatch's share of its batch.
    """
    leaf = _leaf(model, inputs)
    with autocast_context(leaf.device):
        loss: Tensor = model(leaf, targets.to(leaf.device))
    model.attach_gradient()
    torch.autograd.backward(loss * weight)
    return float(loss.detach()), leaf.grad


def _leaf(model: LanguageModel, inputs: Tensor) -> Tensor:
    """Return the inputs on the model's device, detached; a stream gets a gradient, token ids have none."""
    leaf = inputs.detach().to(model.flat.device)
    return leaf if model.cut.has_embedding else leaf.requires_grad_()

"""The forward and backward passes of one pipeline stage for one microbatch.

A forward pass keeps no graph. The backward pass runs the forward pass again from the same input, so a stage holds its
inputs instead of all activations, and a peer that did not run the forward pass may run the backward pass. At the same
weights the gradient is bit-equal to that of a single pass with its graph.

Between stages, activations and their gradients travel in the format that `pipeline.activations` names. A trainer
encodes and decodes them on its device. Values that are not finite are neither sent nor accepted.

Letters in comments: B sequences, T tokens, S values of the stream (`model.stream_width`).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from node.model import LanguageModel
from node.trainer.devices.device import autocast_context
from optim.codecs.int8_on_device import decode_int8, encode_int8
from optim.errors import CodecError


class ActivationFormat(ABC):
    """A format; `PipelineSection.activation_bytes` gives the size of its payloads."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Return the payload (bytes,) uint8 of a tensor on its device. Raises CodecError if a value is not finite."""

    @abstractmethod
    def decode(self, payload: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return fp32 values of this shape on the payload's device. Raises CodecError for a malformed payload."""

    def round_trip(self, values: Tensor) -> Tensor:
        """Return the values as the next stage receives them."""
        return self.decode(self.encode(values), tuple(values.shape))


@dataclass(frozen=True)
class FloatFormat(ActivationFormat):
    """Floating-point numbers of one type."""

    dtype: torch.dtype

    def encode(self, values: Tensor) -> Tensor:
        """Return the numbers, rounded to nearest."""
        return _require_finite(values.detach().to(self.dtype).contiguous()).view(-1).view(torch.uint8)

    def decode(self, payload: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the numbers, in the payload's memory if they are fp32."""
        return _require_finite(payload.view(self.dtype).float()).view(shape)


class Int8Format(ActivationFormat):
    """Integers of 8 bits with a scale for each block of 256, as the codec `int8` of contributions."""

    def encode(self, values: Tensor) -> Tensor:
        """Return header, scales and integers."""
        return encode_int8(values)

    def decode(self, payload: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return integers times scales."""
        return decode_int8(payload, math.prod(shape)).view(shape)


FORMATS: Final[dict[str, ActivationFormat]] = {
    "fp32": FloatFormat(torch.float32),
    "bf16": FloatFormat(torch.bfloat16),
    "int8": Int8Format(),
}


def _require_finite(values: Tensor) -> Tensor:
    if not bool(torch.isfinite(values).all()):
        raise CodecError("a value is not finite")
    return values


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

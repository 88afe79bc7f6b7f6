"""The same model for long comparisons on a processor: compiled, its matrix products in bf16.

On a processor with bf16 matrix units a training step of a small model takes a third of the time. Its losses differ from
those of `Llama` by rounding, as they do on accelerators, which train in bf16 too. Compiling needs a C++ compiler and
takes some seconds, once for all models of one shape.
"""

import math
import os
import shutil
from typing import Final

import torch
from torch import Tensor

from node.model.llama import Llama
from protocol.manifest import ModelSection

COMPILERS: Final = ("g++", "clang++")


def has_compiler() -> bool:
    """One that torch would find: CXX, or a usual name."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", ""), *COMPILERS) if name)


class CompiledLlama(Llama):
    """On a processor; its weights are fp32, as `Llama`'s."""

    causal: Tensor

    def __init__(self, config: ModelSection) -> None:
        super().__init__(config)
        future = torch.full((config.context, config.context), -math.inf).triu(1)
        self.register_buffer("causal", future, persistent=False)
        self.compile(dynamic=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(tokens, targets)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Written out: of torch's fused attention, the backward pass in bf16 is the slowest part of a step.

        softmax(s) v = exp(s - max s) v / sum exp(s - max s): divided are D values a token, not as many as it looks at.
        """
        heads, length, depth = query.shape[1:]
        key, value = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (key, value))
        scores = (query / math.sqrt(depth) @ key.transpose(-1, -2)).float() + self.causal[:length, :length]
        powers = torch.exp(scores - scores.detach().amax(dim=-1, keepdim=True))
        mixed = (powers.to(value.dtype) @ value).float() / powers.sum(dim=-1, keepdim=True)
        return mixed.to(value.dtype)

"""A Llama decoder (arXiv 2302.13971) whose weights are ONE flat fp32 parameter.

RMSNorm (1910.07467), rotary positions (2104.09864, the two halves of a head paired as Hugging Face does), SwiGLU
(2002.05202), grouped-query attention (2305.13245). The optimizer sees a single tensor, `Llama.flat`, in the order of
the shape table: loading, storing and clipping are one operation, and a fused AdamW over one tensor costs a fraction of
one over dozens of small ones. `forward` cuts it into views with one `split`, whose gradient is one concatenation.

Letters in comments: B sequences, T tokens, W width, N heads, K heads of keys and values, D width of a head.

The same model for long comparisons on a processor: compiled, its matrix products in bf16.

On a processor with bf16 matrix units a training step of a small model takes a third of the time. Its losses differ from
those of `Llama` by rounding, as they do on accelerators, which train in bf16 too. Compiling needs a C++ compiler and
takes some seconds, once for all models of one shape.
"""

import math
import os
import shutil
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from node.model.shapes import shape_table
from protocol.manifest import ModelSection

NORM_EPSILON = 1e-5


class Llama(nn.Module):
    """`flat` (numel,) fp32 on `device` is the only parameter; it starts at zero: `load_flat` gives it values.

    The matrix products run in fp32, or in bf16 under `torch.autocast`; norms, positions and the loss stay in fp32.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, config: ModelSection, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.config = config
        self.shapes = shape_table(config)
        self.flat = nn.Parameter(torch.zeros(self.shapes.numel, device=device))
        self.matrix_shapes = _list_matrix_shapes(config)
        for name, table in zip(("cosines", "sines"), rotary_tables(config), strict=True):
            self.register_buffer(name, table.to(device), persistent=False)

    def load_flat(self, flat: Tensor) -> None:
        """Take the weights from `flat` (numel,), fp32 on any device."""
        with torch.no_grad():
            self.flat.copy_(flat)

    def store_flat(self, out: Tensor) -> None:
        """Copy the weights into `out` (numel,), fp32 on any device."""
        with torch.no_grad():
            out.copy_(self.flat)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """`tokens` (B, T) int64, T at most the context. Without `targets`: logits (B, T, vocabulary).

        With `targets` (B, T) int64: the mean cross entropy in nats a token, a scalar.
        """
        # One view a matrix product: query, key and value are one matrix, and so are gate and up.
        weights = torch.split(self.flat, [rows * columns for rows, columns in self.matrix_shapes])
        matrices = [piece.view(shape) for piece, shape in zip(weights, self.matrix_shapes, strict=True)]
        embedding, layers = matrices[0], matrices[1:]
        stream = F.embedding(tokens, embedding)  # (B, T, W)
        for layer in range(self.config.layers):
            stream = self._apply_layer(stream, layers[6 * layer : 6 * layer + 6])
        final_norm, output = layers[6 * self.config.layers], embedding if self.config.tied else layers[-1]
        logits = F.linear(rms_norm(stream, final_norm), output)
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def _apply_layer(self, stream: Tensor, matrices: list[Tensor]) -> Tensor:
        projection, attention_output, gate_up, down, attention_norm, mlp_norm = matrices
        heads = self._attention(F.linear(rms_norm(stream, attention_norm), projection))
        stream = stream + F.linear(heads, attention_output)
        gate, up = F.linear(rms_norm(stream, mlp_norm), gate_up).chunk(2, dim=-1)
        return stream + F.linear(F.silu(gate) * up, down)

    def _attention(self, projected: Tensor) -> Tensor:
        """`projected` (B, T, (N + 2K) D) holds query, key and value; the result (B, T, W) the heads' outputs."""
        batch, length, _ = projected.shape
        heads, groups = self.config.heads, self.config.kv_heads or self.config.heads
        split = projected.view(batch, length, heads + 2 * groups, -1)
        turned = apply_rotary(split[:, :, : heads + groups], self.cosines[:length], self.sines[:length])
        query, key = torch.split(turned.transpose(1, 2), [heads, groups], dim=1)  # (B, N, T, D), (B, K, T, D)
        value = split[:, :, heads + groups :].transpose(1, 2)
        return self._attend(query, key, value).transpose(1, 2).reshape(batch, length, -1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention: `query` (B, N, T, D), `key` and `value` (B, K, T, D); the result (B, N, T, D)."""
        grouped = key.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


def rms_norm(stream: Tensor, gain: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last dimension; `gain` is (1, W)."""
    return F.rms_norm(stream, (stream.shape[-1],), gain.view(-1), NORM_EPSILON)


def apply_rotary(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + D/2}) by the angle of its position: `heads` (B, T, N, D), tables (T, D/2)."""
    first, second = heads.chunk(2, dim=-1)
    cosines, sines = cosines[:, None], sines[:, None]
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return turned.type_as(heads)


def rotary_tables(config: ModelSection) -> tuple[Tensor, Tensor]:
    """Cosines and sines (context, D/2) of position * theta^(-2i / D), in fp32."""
    half = config.width // config.heads // 2
    frequencies = config.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(config.context, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def _list_matrix_shapes(config: ModelSection) -> list[tuple[int, int]]:
    """The matrices of `forward`, in the order of the shape table, neighbours that share an input taken together."""
    width, hidden = config.width, config.hidden
    projected = width + 2 * (width // config.heads) * (config.kv_heads or config.heads)
    layer = [(projected, width), (width, width), (2 * hidden, width), (width, hidden), (1, width), (1, width)]
    output = [] if config.tied else [(config.vocabulary, width)]
    return [(config.vocabulary, width), *layer * config.layers, (1, width), *output]


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

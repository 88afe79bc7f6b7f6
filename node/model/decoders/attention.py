"""Grouped-query attention (arXiv 2305.13245) with rotary positions (2104.09864) and, in some families, head norms.

The two halves of a head are paired, as Hugging Face does. Letters in comments: B sequences, T tokens, W width, N heads,
K heads of keys and values, D width of a head.
"""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from node.model.computation.fp8 import multiply
from node.model.decoders.documents import DenseDocuments, DocumentAttention, choose_document_attention
from node.model.decoders.layers import HasProducts, Linear, RMSNorm
from node.model.decoders.rotary import rotary_tables
from node.model.joined_weights import join_rows
from protocol.manifest.model import ModelSection


class CausalAttention(nn.Module):
    """The part of attention without weights, shared by all layers: rotary positions, and which tokens are seen."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, config: ModelSection, device: torch.device | str) -> None:
        super().__init__()
        for name, table in zip(("cosines", "sines"), rotary_tables(config), strict=True):
            self.register_buffer(name, table.to(device), persistent=False)
        end = config.document_end
        self.documents = None if end is None else self.document_attention(end, device, config.head_width)

    def document_attention(self, end: int, device: torch.device | str, head_width: int) -> DocumentAttention:
        """Build the attention within documents that end with the token `end`."""
        return choose_document_attention(end, device, head_width)

    def see(self, tokens: Tensor) -> None:
        """Take note of the token ids (B, T) of a pass, before its first layer."""
        if self.documents is not None:
            self.documents.see(tokens)

    def rotate(self, heads: Tensor) -> Tensor:
        """Apply rotary positions to `heads` (B, T, N, D)."""
        length = heads.shape[1]
        return apply_rotary(heads, self.cosines[:length], self.sines[:length])

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Apply causal attention to `query` (B, N, T, D), `key` and `value` (B, K, T, D); return (B, N, T, D)."""
        if self.documents is not None:
            return self.documents.attend(query, key, value)
        grouped = key.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


class DenseCausalAttention(CausalAttention):
    """The same, for a model that is compiled as a whole."""

    def document_attention(self, end: int, device: torch.device | str, head_width: int) -> DocumentAttention:
        return DenseDocuments(end)


class CompiledCausalAttention(DenseCausalAttention):
    """The same, written for the compiler on a CPU."""

    future: Tensor

    def __init__(self, config: ModelSection, device: torch.device | str) -> None:
        super().__init__(config, device)
        future = torch.full((config.context, config.context), -math.inf, device=device).triu(1)
        self.register_buffer("future", future, persistent=False)

    def document_attention(self, end: int, device: torch.device | str, head_width: int) -> DocumentAttention:
        return DenseDocuments(end, hides_future=False)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Apply causal attention, written out: torch's fused one has a slow backward pass in bf16.

        softmax(s) v = exp(s - max s) v / sum exp(s - max s): this divides D values per token instead of T.
        """
        heads, length, depth = query.shape[1:]
        key, value = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (key, value))
        scores = (query / math.sqrt(depth) @ key.transpose(-1, -2)).float() + self.future[:length, :length]
        if isinstance(self.documents, DenseDocuments):
            scores = scores.masked_fill(~self.documents.mask, -math.inf)
        powers = torch.exp(scores - scores.detach().amax(dim=-1, keepdim=True))
        mixed = (powers.to(value.dtype) @ value).float() / powers.sum(dim=-1, keepdim=True)
        return mixed.to(value.dtype)


class Attention(HasProducts):
    """Grouped-query attention of one layer."""

    def __init__(self, config: ModelSection, causal: CausalAttention) -> None:
        super().__init__()
        self.heads, self.groups = config.heads, config.key_heads
        queries, keys = config.head_width * self.heads, config.head_width * self.groups
        self.causal = causal
        self.q_proj = Linear(config.width, queries)
        self.k_proj = Linear(config.width, keys)
        self.v_proj = Linear(config.width, keys)
        self.o_proj = Linear(queries, config.stream_width)

    def forward(self, stream: Tensor) -> Tensor:
        """Return what attention adds to the stream (B, T, W), or to its values in a subspace."""
        batch, length, _ = stream.shape
        heads, groups = self.heads, self.groups
        joined = join_rows(self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
        projected = multiply(stream, joined, self.in_fp8)
        split = projected.view(batch, length, heads + 2 * groups, -1)
        rotated = self.causal.rotate(self.normalize(split[:, :, : heads + groups]))
        query, key = torch.split(rotated.transpose(1, 2), [heads, groups], dim=1)  # (B, N, T, D), (B, K, T, D)
        value = split[:, :, heads + groups :].transpose(1, 2)
        mixed = self.causal.attend(query, key, value)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return output

    def normalize(self, heads: Tensor) -> Tensor:
        """Return the heads of queries and keys (B, T, N + K, D) as they are."""
        return heads


class NormalizedAttention(Attention):
    """Attention with a norm over each head of queries and keys (QK-norm, arXiv 2302.05442)."""

    def __init__(self, config: ModelSection, causal: CausalAttention) -> None:
        super().__init__(config, causal)
        self.q_norm = RMSNorm(config.head_width, config.norm_epsilon)
        self.k_norm = RMSNorm(config.head_width, config.norm_epsilon)

    def normalize(self, heads: Tensor) -> Tensor:
        """Return the heads with unit mean square, times their gains; the norms run in fp32."""
        query, key = torch.split(heads.float(), [self.heads, self.groups], dim=2)
        return torch.cat((self.q_norm(query), self.k_norm(key)), dim=2).type_as(heads)


def apply_rotary(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i + D/2}) by the angle of its position: `heads` (B, T, N, D), tables (T, D/2)."""
    first, second = heads.chunk(2, dim=-1)
    cosines, sines = cosines[:, None], sines[:, None]
    rotated = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return rotated.type_as(heads)

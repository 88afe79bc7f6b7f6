"""Llama decoders (arXiv 2302.13971).

RMSNorm (1910.07467), rotary positions (2104.09864, the two halves of a head paired as Hugging Face does), SwiGLU
(2002.05202), grouped-query attention (2305.13245).

Letters in comments: B sequences, T tokens, W width, N heads, K heads of keys and values, D width of a head.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from node.model.cut import WHOLE, Cut
from node.model.interface import Block, LanguageModel, ModelFamily
from node.model.joined_weights import join_rows
from node.model.shapes import Entry
from protocol.manifest import ModelSection

NORM_EPSILON = 1e-5
STANDARD_DEVIATION = 0.02
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT = "lm_head.weight"


class LlamaFamily(ModelFamily):
    """Llama decoders of any size."""

    kind = "llama"
    title = "Llama"

    def blocks(self, config: ModelSection) -> Iterator[tuple[Entry, ...]]:
        """Yield the parameters of embedding, layers and head."""
        yield ((EMBEDDING, (config.vocabulary, config.width)),)
        for layer in range(config.layers):
            yield tuple((f"model.layers.{layer}.{name}.weight", shape) for name, shape in _layer_entries(config))
        output = () if config.tied else ((OUTPUT, (config.vocabulary, config.width)),)
        yield ((FINAL_NORM, (config.width,)), *output)

    def build(self, config: ModelSection, device: torch.device | str = "cpu", cut: Cut = WHOLE) -> LanguageModel:
        """Build the decoder, or one stage of it."""
        return Llama(config, device, cut)

    def build_compiled(self, config: ModelSection) -> LanguageModel:
        """Build the decoder for long runs on a CPU."""
        return CompiledLlama(config)

    def standard_deviation(self, config: ModelSection, name: str) -> float:
        """Return 0.02, as in GPT-2, and less for matrices that write into the residual stream.

        They get 0.02 / sqrt(2 layers), so that the stream's variance at the start does not grow with depth.
        """
        writes_to_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
        return STANDARD_DEVIATION / math.sqrt(2 * config.layers) if writes_to_stream else STANDARD_DEVIATION

    def layer_activation_bytes(self, config: ModelSection) -> float:
        """Apply the formula of Korthikanti et al. (arXiv 2205.05198, section 4)."""
        return config.context * config.width * (34 + 5 * config.heads * config.context / config.width)

    def hugging_face_config(self, config: ModelSection) -> dict[str, Any]:
        """Return the config.json of LlamaForCausalLM."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": config.vocabulary,
            "hidden_size": config.width,
            "intermediate_size": config.hidden,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads or config.heads,
            "head_dim": config.width // config.heads,
            "max_position_embeddings": config.context,
            # transformers 4 reads the first of these two, transformers 5 the second.
            "rope_theta": config.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "rms_norm_eps": NORM_EPSILON,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": config.tied,
            "torch_dtype": "float32",
        }


def _layer_entries(config: ModelSection) -> Iterator[Entry]:
    """Yield the parameters of one layer; matrices that `join_rows` joins are neighbours."""
    keys = config.width // config.heads * (config.kv_heads or config.heads)
    yield "self_attn.q_proj", (config.width, config.width)
    yield "self_attn.k_proj", (keys, config.width)
    yield "self_attn.v_proj", (keys, config.width)
    yield "self_attn.o_proj", (config.width, config.width)
    yield "mlp.gate_proj", (config.hidden, config.width)
    yield "mlp.up_proj", (config.hidden, config.width)
    yield "mlp.down_proj", (config.width, config.hidden)
    yield "input_layernorm", (config.width,)
    yield "post_attention_layernorm", (config.width,)


class _Uninitialised:
    """Leave the weights alone: `node.model.initialization` computes them, and torch need not."""

    def reset_parameters(self) -> None:
        pass


class Linear(_Uninitialised, nn.Linear):
    """A matrix without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)


class Embedding(_Uninitialised, nn.Embedding):
    """One row for each token id."""


class RMSNorm(_Uninitialised, nn.RMSNorm):
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, width: int) -> None:
        super().__init__(width, NORM_EPSILON)


class CausalAttention(nn.Module):
    """The part of attention without weights, shared by all layers: rotary positions and the causal mask."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, config: ModelSection, device: torch.device | str) -> None:
        super().__init__()
        for name, table in zip(("cosines", "sines"), rotary_tables(config), strict=True):
            self.register_buffer(name, table.to(device), persistent=False)

    def rotate(self, heads: Tensor) -> Tensor:
        """Apply rotary positions to `heads` (B, T, N, D)."""
        length = heads.shape[1]
        return apply_rotary(heads, self.cosines[:length], self.sines[:length])

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Apply causal attention to `query` (B, N, T, D), `key` and `value` (B, K, T, D); return (B, N, T, D)."""
        grouped = key.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


class CompiledCausalAttention(CausalAttention):
    """The same, written for the compiler on a CPU."""

    future: Tensor

    def __init__(self, config: ModelSection, device: torch.device | str) -> None:
        super().__init__(config, device)
        future = torch.full((config.context, config.context), -math.inf, device=device).triu(1)
        self.register_buffer("future", future, persistent=False)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Apply causal attention, written out: torch's fused one has a slow backward pass in bf16.

        softmax(s) v = exp(s - max s) v / sum exp(s - max s): this divides D values per token instead of T.
        """
        heads, length, depth = query.shape[1:]
        key, value = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (key, value))
        scores = (query / math.sqrt(depth) @ key.transpose(-1, -2)).float() + self.future[:length, :length]
        powers = torch.exp(scores - scores.detach().amax(dim=-1, keepdim=True))
        mixed = (powers.to(value.dtype) @ value).float() / powers.sum(dim=-1, keepdim=True)
        return mixed.to(value.dtype)


class Attention(nn.Module):
    """Grouped-query attention of one layer."""

    def __init__(self, config: ModelSection, causal: CausalAttention) -> None:
        super().__init__()
        self.heads, self.groups = config.heads, config.kv_heads or config.heads
        keys = config.width // config.heads * self.groups
        self.causal = causal
        self.q_proj = Linear(config.width, config.width)
        self.k_proj = Linear(config.width, keys)
        self.v_proj = Linear(config.width, keys)
        self.o_proj = Linear(config.width, config.width)

    def forward(self, stream: Tensor) -> Tensor:
        """Return what attention adds to the stream; both (B, T, W)."""
        batch, length, _ = stream.shape
        heads, groups = self.heads, self.groups
        projected = F.linear(stream, join_rows(self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))
        split = projected.view(batch, length, heads + 2 * groups, -1)
        rotated = self.causal.rotate(split[:, :, : heads + groups])
        query, key = torch.split(rotated.transpose(1, 2), [heads, groups], dim=1)  # (B, N, T, D), (B, K, T, D)
        value = split[:, :, heads + groups :].transpose(1, 2)
        mixed = self.causal.attend(query, key, value)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return output


class GatedMlp(nn.Module):
    """SwiGLU of one layer."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.gate_proj = Linear(config.width, config.hidden)
        self.up_proj = Linear(config.width, config.hidden)
        self.down_proj = Linear(config.hidden, config.width)

    def forward(self, stream: Tensor) -> Tensor:
        """Return what the MLP adds to the stream; both (B, T, W)."""
        gate, up = F.linear(stream, join_rows(self.gate_proj.weight, self.up_proj.weight)).chunk(2, dim=-1)
        output: Tensor = self.down_proj(F.silu(gate) * up)
        return output


class LlamaLayer(nn.Module):
    """One decoder layer: attention and MLP, each after a norm and added to the stream."""

    def __init__(self, config: ModelSection, causal: CausalAttention) -> None:
        super().__init__()
        self.self_attn = Attention(config, causal)
        self.mlp = GatedMlp(config)
        self.input_layernorm = RMSNorm(config.width)
        self.post_attention_layernorm = RMSNorm(config.width)

    def forward(self, stream: Tensor) -> Tensor:
        """Return the new stream; both (B, T, W)."""
        stream = stream + self.self_attn(self.input_layernorm(stream))
        stream = stream + self.mlp(self.post_attention_layernorm(stream))
        return stream


class LlamaBody(nn.Module):
    """All parts of a cut but the output matrix, with Hugging Face's names."""

    def __init__(self, config: ModelSection, causal: CausalAttention, cut: Cut, layers: range) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocabulary, config.width) if cut.has_embedding else None
        self.layers = nn.ModuleDict({str(layer): LlamaLayer(config, causal) for layer in layers})
        self.norm = RMSNorm(config.width) if cut.has_head else None


class Llama(LanguageModel):
    """The decoder, whole or one stage of it."""

    attention_type: type[CausalAttention] = CausalAttention

    def __init__(self, config: ModelSection, device: torch.device | str = "cpu", cut: Cut = WHOLE) -> None:
        family = LlamaFamily()
        super().__init__(config, family.shape_table(config, cut), cut)
        blocks, causal = family.block_range(config, cut), self.attention_type(config, device)
        layers = range(max(0, blocks.start - 1), min(config.layers, blocks.stop - 1))
        with torch.device("meta"):
            self.model = LlamaBody(config, causal, cut, layers)
            has_output = cut.has_head and not config.tied
            self.lm_head = Linear(config.width, config.vocabulary) if has_output else None
        self._place_parameters(device)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Return embedding, layers and head, or those of them that the stage has."""
        embedding = () if self.model.embed_tokens is None else (self.model.embed_tokens,)
        head = (self._apply_head,) if self.cut.has_head else ()
        return (*embedding, *self.model.layers.values(), *head)

    def _apply_head(self, stream: Tensor) -> Tensor:
        output = self.model.embed_tokens if self.lm_head is None else self.lm_head
        assert self.model.norm is not None and output is not None
        return F.linear(self.model.norm(stream), output.weight)


class CompiledLlama(Llama):
    """The same model for long runs on a CPU: compiled, its matrix products in bf16, its weights in fp32."""

    attention_type = CompiledCausalAttention

    def __init__(self, config: ModelSection) -> None:
        super().__init__(config)
        self.compile(dynamic=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits or loss, as `LanguageModel.forward`."""
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(tokens, targets)


def apply_rotary(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i + D/2}) by the angle of its position: `heads` (B, T, N, D), tables (T, D/2)."""
    first, second = heads.chunk(2, dim=-1)
    cosines, sines = cosines[:, None], sines[:, None]
    rotated = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return rotated.type_as(heads)


def rotary_tables(config: ModelSection) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (context, D/2) of position * theta^(-2i / D), in fp32."""
    half = config.width // config.heads // 2
    frequencies = config.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(config.context, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()

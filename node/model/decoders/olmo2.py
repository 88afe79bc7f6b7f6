"""OLMo 2 decoders (arXiv 2501.00656): norms after attention and MLP, and over all queries and all keys."""

from collections.abc import Iterator

import torch
from torch import Tensor

from node.model.config_keys import DEFAULTS, ConfigKeys
from node.model.decoders.decoder import Attention, CausalAttention, DecoderLayer, RMSNorm
from node.model.decoders.family import DecoderFamily
from node.model.shapes import Entry
from protocol.errors import ManifestError
from protocol.manifest.model import ModelSection


class Olmo2Attention(Attention):
    """Attention with one norm over the queries of all heads, and one over their keys."""

    def __init__(self, config: ModelSection, causal: CausalAttention) -> None:
        super().__init__(config, causal)
        self.q_norm = RMSNorm(config.head_width * config.heads, config.norm_epsilon)
        self.k_norm = RMSNorm(config.head_width * config.key_heads, config.norm_epsilon)

    def normalize(self, heads: Tensor) -> Tensor:
        """Return queries and keys (B, T, N + K, D) with unit mean square over all heads; the norms run in fp32."""
        query, key = torch.split(heads.float(), [self.heads, self.groups], dim=2)
        normalized = self.q_norm(query.flatten(2)), self.k_norm(key.flatten(2))
        return torch.cat(normalized, dim=2).view_as(heads).type_as(heads)


class Olmo2Layer(DecoderLayer):
    """Attention and MLP, each followed by a norm: the stream itself is never normalized before the head."""

    def _add_norms(self, config: ModelSection) -> None:
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_epsilon)
        self.post_feedforward_layernorm = RMSNorm(config.width, config.norm_epsilon)

    def forward(self, stream: Tensor) -> Tensor:
        """Return the new stream; both (B, T, W)."""
        stream = stream + self.post_attention_layernorm(self.self_attn(stream))
        stream = stream + self.post_feedforward_layernorm(self.mlp(stream))
        return stream


class Olmo2Family(DecoderFamily):
    """OLMo 2 decoders of any size."""

    kind = "olmo2"
    title = "OLMo 2"
    config_keys = ConfigKeys("olmo2", "Olmo2ForCausalLM", defaults=DEFAULTS | {"norm_epsilon": 1e-5})
    attention_type = Olmo2Attention
    layer_type = Olmo2Layer

    def require_fit(self, config: ModelSection) -> None:
        """Raise ManifestError for a subspace: its basis cannot be moved past the norm of an output."""
        super().require_fit(config)
        if config.subspace is not None:
            reason = f"models of the kind {self.kind} cannot have one; remove it, or write another model.kind"
            raise ManifestError(f"model.subspace: {reason}", ("model", "subspace"))

    def attention_entries(self, config: ModelSection) -> Iterator[Entry]:
        """Yield the parameters of a layer's attention."""
        yield from super().attention_entries(config)
        yield "self_attn.q_norm", (config.head_width * config.heads,)
        yield "self_attn.k_norm", (config.head_width * config.key_heads,)

    def norm_entries(self, config: ModelSection) -> Iterator[Entry]:
        """Yield the parameters of a layer's norms."""
        yield "post_attention_layernorm", (config.width,)
        yield "post_feedforward_layernorm", (config.width,)

"""Qwen3 decoders (arXiv 2505.09388): Llama's, with norms over the heads of queries and keys, and heads of any width."""

from collections.abc import Iterator
from typing import Any

from node.model.decoders.attention import NormalizedAttention
from node.model.decoders.family import DecoderFamily
from node.model.hugging_face.config_keys import DEFAULTS, ConfigKeys
from node.model.shapes import Entry
from protocol.manifest.model import ModelSection


class Qwen3Family(DecoderFamily):
    """Dense Qwen3 decoders of any size."""

    kind = "qwen3"
    title = "Qwen3"
    config_keys = ConfigKeys("qwen3", "Qwen3ForCausalLM", defaults=DEFAULTS | {"head_size": 128})
    attention_type = NormalizedAttention

    def attention_entries(self, config: ModelSection) -> Iterator[Entry]:
        """Yield the parameters of a layer's attention."""
        yield from super().attention_entries(config)
        yield "self_attn.q_norm", (config.head_width,)
        yield "self_attn.k_norm", (config.head_width,)

    def hugging_face_config(self, config: ModelSection) -> dict[str, Any]:
        """Return the config.json of Qwen3ForCausalLM."""
        return super().hugging_face_config(config) | {"use_sliding_window": False}

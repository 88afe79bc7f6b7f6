"""The arithmetic that all families of decoders share: parameters, initial weights, memory, config.json."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from node.model.config_keys import ConfigKeys
from node.model.decoders.decoder import (
    Attention,
    CausalAttention,
    CompiledDecoder,
    Decoder,
    DecoderLayer,
    GatedMlp,
    LayerwiseDecoder,
)
from node.model.decoders.subspace import Subspace
from node.model.interface import LanguageModel, ModelFamily
from node.model.shapes import WHOLE, Cut, Entry
from protocol.manifest.model import ModelSection

STANDARD_DEVIATION = 0.02
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT = "lm_head.weight"


class DecoderFamily(ModelFamily):
    """Decoders with rotary positions and gated MLPs; pre-norm, unless the family has another type of layer."""

    config_keys: ClassVar[ConfigKeys]
    attention_type: ClassVar[type[Attention]] = Attention
    layer_type: ClassVar[type[DecoderLayer]] = DecoderLayer

    def layer(self, config: ModelSection, causal: CausalAttention, subspace: Subspace | None) -> DecoderLayer:
        """Build a layer; its parameters are those of `layer_entries`, in the same order."""
        return self.layer_type(self.attention_type(config, causal), self.mlp(config), config, subspace)

    def mlp(self, config: ModelSection) -> nn.Module:
        """Build the MLP of a layer, which maps the stream (B, T, W) to its own addition to it."""
        return GatedMlp(config)

    def blocks(self, config: ModelSection) -> Iterator[tuple[Entry, ...]]:
        """Yield the parameters of embedding, layers and head."""
        yield ((EMBEDDING, (config.vocabulary, config.stream_width)),)
        for layer in range(config.layers):
            yield tuple((f"model.layers.{layer}.{name}.weight", shape) for name, shape in self.layer_entries(config))
        output = () if config.tied else ((OUTPUT, (config.vocabulary, config.width)),)
        yield ((FINAL_NORM, (config.width,)), *output)

    def layer_entries(self, config: ModelSection) -> Iterator[Entry]:
        """Yield the parameters of one layer; matrices that `join_rows` joins are neighbours."""
        yield from self.attention_entries(config)
        yield from self.mlp_entries(config)
        yield from self.norm_entries(config)

    def norm_entries(self, config: ModelSection) -> Iterator[Entry]:
        """Yield the parameters of a layer's norms."""
        yield "input_layernorm", (config.width,)
        yield "post_attention_layernorm", (config.width,)

    def attention_entries(self, config: ModelSection) -> Iterator[Entry]:
        """Yield the parameters of a layer's attention."""
        queries, keys = config.head_width * config.heads, config.head_width * config.key_heads
        yield "self_attn.q_proj", (queries, config.width)
        yield "self_attn.k_proj", (keys, config.width)
        yield "self_attn.v_proj", (keys, config.width)
        yield "self_attn.o_proj", (config.stream_width, queries)

    def mlp_entries(self, config: ModelSection) -> Iterator[Entry]:
        """Yield the parameters of a layer's MLP."""
        yield from gated_mlp_entries("mlp", config)

    def build(self, config: ModelSection, device: torch.device | str = "cpu", cut: Cut = WHOLE) -> LanguageModel:
        """Build the decoder, or one stage of it."""
        return Decoder(self, self.layer, config, device, cut)

    def build_compiled(self, config: ModelSection, device: torch.device | str = "cpu") -> LanguageModel:
        """Build the decoder for long runs."""
        return CompiledDecoder(self, self.layer, config, device)

    def build_layerwise(
        self, config: ModelSection, device: torch.device | str, place: torch.device | str
    ) -> LanguageModel:
        """Build the decoder for long runs on several devices."""
        return LayerwiseDecoder(self, self.layer, config, device, place)

    def first_values(self, config: ModelSection, entry: Entry) -> tuple[float, float]:
        """Return a deviation of 0.02, as in GPT-2, and less for matrices that write into the residual stream.

        They get 0.02 / sqrt(2 layers), so that the stream's variance at the start does not grow with depth. Gains of
        the norms begin at 1.
        """
        name, shape = entry
        if len(shape) != 2:
            return 1.0, 0.0
        return 0.0, STANDARD_DEVIATION / math.sqrt(2 * config.layers) if writes_to_stream(name) else STANDARD_DEVIATION

    def matrix_work(self, config: ModelSection, entry: Entry) -> float:
        """Count the products with the basis of a subspace, two in a layer, with the output matrix of attention."""
        has_basis = config.subspace is not None and entry[0].endswith("o_proj.weight")
        basis = 2 * config.width * config.stream_width if has_basis else 0
        return super().matrix_work(config, entry) + basis

    def hugging_face_weights(self, config: ModelSection, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights by their names in transformers; factors of a subspace are multiplied out."""
        named = super().hugging_face_weights(config, views)
        if config.subspace is None:
            return named
        subspace = Subspace(config, "cpu")
        for name, view in views.items():
            if name == EMBEDDING:
                named[name] = subspace.expand(view, torch.arange(config.vocabulary))
            elif writes_to_stream(name):
                named[name] = subspace.basis @ view
        return named

    def layer_activation_bytes(self, config: ModelSection) -> float:
        """Apply the formula of Korthikanti et al. (arXiv 2205.05198, section 4), with heads of any width."""
        width = max(config.width, config.head_width * config.heads)
        return config.context * (34 * width + 5 * config.heads * config.context)

    def hugging_face_config(self, config: ModelSection) -> dict[str, Any]:
        """Return the keys of config.json that all these families have."""
        return {
            "architectures": [self.config_keys.architecture],
            "model_type": self.config_keys.model_type,
            "vocab_size": config.vocabulary,
            "hidden_size": config.width,
            "intermediate_size": config.hidden,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.key_heads,
            "head_dim": config.head_width,
            "max_position_embeddings": config.context,
            **_rope_keys(config),
            "rms_norm_eps": config.norm_epsilon,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": config.tied,
            "torch_dtype": "float32",
        }


class LlamaFamily(DecoderFamily):
    """Llama decoders of any size (arXiv 2302.13971): the base as it is."""

    kind = "llama"
    title = "Llama"
    config_keys = ConfigKeys("llama", "LlamaForCausalLM")

    def hugging_face_config(self, config: ModelSection) -> dict[str, Any]:
        """Return the config.json of LlamaForCausalLM."""
        return super().hugging_face_config(config) | {"mlp_bias": False}


def _rope_keys(config: ModelSection) -> dict[str, Any]:
    """Return theta and scaling twice: transformers 4 reads the first two keys, transformers 5 the third."""
    theta = {"rope_theta": config.rope_theta}
    if config.rope_scaling is None:
        return theta | {"rope_parameters": {"rope_type": "default"} | theta}
    scaling = config.rope_scaling.model_dump(exclude_none=True)
    return theta | {"rope_scaling": scaling, "rope_parameters": scaling | theta}


def writes_to_stream(name: str) -> bool:
    """Return whether a parameter is an output projection, whose product is added to the residual stream."""
    return name.endswith(("o_proj.weight", "down_proj.weight"))


def gated_mlp_entries(prefix: str, config: ModelSection) -> Iterator[Entry]:
    """Yield the parameters of a `GatedMlp`."""
    yield f"{prefix}.gate_proj", (config.hidden, config.width)
    yield f"{prefix}.up_proj", (config.hidden, config.width)
    yield f"{prefix}.down_proj", (config.stream_width, config.hidden)

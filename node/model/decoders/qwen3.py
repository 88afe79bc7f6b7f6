"""Qwen3 decoders (arXiv 2505.09388): Llama's, with norms over the heads of queries and keys, and heads of any width.

Qwen3-MoE has a mixture of experts in every layer.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from node.model.config_keys import DEFAULTS, FIXED, OPTIONS, SIZES, WITHOUT_EFFECT, ConfigKeys
from node.model.decoders.decoder import NormalizedAttention, SparseMlp
from node.model.decoders.family import DecoderFamily, gated_mlp_entries
from node.model.shapes import Entry
from protocol.errors import ManifestError
from protocol.manifest.model import ModelSection

ROUTER = "mlp.gate"
EXPERTS = "mlp.experts."
SIZES_OF_EXPERTS = {
    **{theirs: ours for theirs, ours in SIZES.items() if ours != "hidden"},
    "moe_intermediate_size": "hidden",
    "num_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
}


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


class Qwen3MoeFamily(Qwen3Family):
    """Sparse Qwen3 decoders of any size; `hidden` is the inner width of an expert."""

    kind = "qwen3-moe"
    title = "Qwen3-MoE"
    config_keys = ConfigKeys(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        sizes=SIZES_OF_EXPERTS,
        options=OPTIONS | {"norm_topk_prob": "normalize_experts", "router_aux_loss_coef": "balance_loss"},
        defaults=DEFAULTS | {"normalize_experts": False, "balance_loss": 0.001},
        fixed=FIXED
        | {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None), "output_router_logits": (False, True)},
        without_effect=WITHOUT_EFFECT | {"intermediate_size"},
        aliases={"num_local_experts": "num_experts"},
    )

    def require_fit(self, config: ModelSection) -> None:
        """Raise ManifestError unless the manifest says how many experts there are."""
        if config.experts is None:
            reason = f"models of the kind {self.kind} have experts; add experts and experts_per_token"
            raise ManifestError(f"model.experts: {reason}", ("model", "experts"))

    def mlp(self, config: ModelSection) -> nn.Module:
        """Build router and experts of a layer."""
        return SparseMlp(config)

    def mlp_entries(self, config: ModelSection) -> Iterator[Entry]:
        """Yield the parameters of a layer's router and experts."""
        yield ROUTER, (config.experts or 0, config.width)
        for number in range(config.experts or 0):
            yield from gated_mlp_entries(f"{EXPERTS}{number}", config)

    def expert_number(self, name: str) -> int:
        """Return the number of the expert that a parameter belongs to; -1 for none."""
        _, found, rest = name.partition(f".{EXPERTS}")
        return int(rest.partition(".")[0]) if found else -1

    def matrix_work(self, config: ModelSection, entry: Entry) -> float:
        """Return the elements of a parameter that a token is multiplied with, if all experts get equally many."""
        work = super().matrix_work(config, entry)
        is_expert = f".{EXPERTS}" in entry[0]
        return work * (config.experts_per_token or 0) / (config.experts or 1) if is_expert else work

    def layer_activation_bytes(self, config: ModelSection) -> float:
        """Estimate attention as for all decoders, and for each expert of a token its input, output and inner values."""
        width = max(config.width, config.head_width * config.heads)
        attention = 15 * width + 5 * config.heads * config.context
        expert = 4 * config.width + 8 * config.hidden
        return float(config.context * (attention + (config.experts_per_token or 0) * expert))

    def hugging_face_config(self, config: ModelSection) -> dict[str, Any]:
        """Return the config.json of Qwen3MoeForCausalLM."""
        return super().hugging_face_config(config) | {
            "moe_intermediate_size": config.hidden,
            "num_experts": config.experts,
            "num_experts_per_tok": config.experts_per_token,
            "norm_topk_prob": config.normalize_experts,
            "router_aux_loss_coef": config.balance_loss,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

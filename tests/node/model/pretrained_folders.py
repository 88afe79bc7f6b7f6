"""Folders of tiny random models, as transformers saves them, and manifests that start from them."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from node.model.families import FAMILIES

KINDS = tuple(family.config_keys.model_type for family in FAMILIES.values() if family.config_keys)
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
MANIFEST = """
[run]
name = "starlings"
[model]
{model}
[data]
source = "text"
path = "corpus.txt"
[train]
batch_tokens = 32
learning_rate = 1e-3
[method]
recipe = "diloco"
"""


def sizes_of(kind: str) -> dict[str, Any]:
    """Return the keys of a small model's config.json."""
    return SIZES | (EXPERTS if kind == "qwen3_moe" else {})


def save_model(folder: Path, kind: str, dtype: torch.dtype = torch.float32, shard: str = "1GB", **sizes: Any) -> Any:
    """Save a random model, whose weights are far from zero; return it as transformers loads it in fp32."""
    config = AutoConfig.for_model(kind, **(sizes_of(kind) | sizes))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def write_manifest(folder: Path, *lines: str) -> Path:
    """Write a manifest whose table [model] has these lines."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.toml"
    path.write_text(MANIFEST.format(model="\n".join(lines)))
    return path

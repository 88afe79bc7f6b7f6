"""The keys of the config.json of one family, as a table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

SIZES: Final = {
    "vocab_size": "vocabulary",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "hidden",
    "max_position_embeddings": "context",
}
OPTIONS: Final = {
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_size",
    "tie_word_embeddings": "tied",
    "rms_norm_eps": "norm_epsilon",
}
DEFAULTS: Final[dict[str, object]] = {"tied": False, "norm_epsilon": 1e-6}  # of transformers
WITHOUT_EFFECT: Final = frozenset(
    {
        "architectures",
        "model_type",
        "_name_or_path",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "initializer_range",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "id2label",
        "label2id",
        "problem_type",
        "max_window_layers",
        "rope_theta",
        "rope_parameters",
        "rope_scaling",
    }
)  # the last three are read by themselves
FIXED: Final[dict[str, tuple[object, ...]]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0, None),
    "pretraining_tp": (1,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
}  # other values are refused


@dataclass(frozen=True)
class ConfigKeys:
    """The keys that a family reads.

    Args:
        model_type: `model_type` in config.json.
        architecture: the class of transformers.
        sizes: our keys by theirs; all are needed.
        options: our keys by theirs; those that config.json lacks have the value in `defaults`.
        defaults: values of transformers, by our keys.
        fixed: the values that a key may have, by their keys.
        without_effect: keys that may have any value.
        aliases: their keys by other names of them.
    """

    model_type: str
    architecture: str
    sizes: Mapping[str, str] = field(default_factory=lambda: SIZES)
    options: Mapping[str, str] = field(default_factory=lambda: OPTIONS)
    defaults: Mapping[str, object] = field(default_factory=lambda: DEFAULTS)
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=lambda: FIXED)
    without_effect: frozenset[str] = WITHOUT_EFFECT
    aliases: Mapping[str, str] = field(default_factory=dict)

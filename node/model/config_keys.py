"""Keys of config.json: which of them a family reads, writes or ignores, and the file itself."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from protocol.errors import ManifestError, MissingFileError
from protocol.fault_words import shorten

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
MAX_NAMED_FAULTS: Final = 5
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
        # Marks of the tool that wrote the file.
        "_attn_implementation_autoset",
        "is_llama_config",
        "tokenizer_class",
        "torchscript",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
        # Options of transformers' classes that a decoder does not read.
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "finetuning_task",
        "is_decoder",
        "prefix",
        "sep_token_id",
        "task_specific_params",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "use_bfloat16",
        # Settings of `generate`, which older versions of transformers kept here.
        "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    }
)  # max_window_layers belongs to sliding windows, which are refused; the keys of rope are read by themselves
FIXED: Final[dict[str, tuple[object, ...]]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0, None),
    "pretraining_tp": (1,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "add_cross_attention": (False,),
    "output_router_logits": (False,),
    "partial_rotary_factor": (1,),
    "pruned_heads": ({}, None),
    "rope_interleaved": (False,),
}  # other values are refused
MAX_BYTES: Final = 2**20


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


def read_json_object(path: Path, advice: str) -> dict[str, Any]:
    """Return the object in a file; errors end in `advice`.

    Raises:
        MissingFileError: it cannot be read.
        ManifestError: it is too large, or not a JSON object.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise MissingFileError(f"cannot read {path}: {reason}; {advice}") from error
    try:
        values = json.loads(text) if len(text) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ManifestError(f"{path} is not a JSON object of at most {MAX_BYTES} bytes; {advice}")
    return values


def join_faults(faults: list[str]) -> str:
    """Return the first faults on one line, and the number of the others."""
    shown = "; ".join(shorten(fault, 200) for fault in faults[:MAX_NAMED_FAULTS])
    return shown + (f"; and {len(faults) - MAX_NAMED_FAULTS} more" if len(faults) > MAX_NAMED_FAULTS else "")

"""A manifest that gives the model by a config.json, or by the name of a model on the hub."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from node.model import model_family, weight_files
from node.run_file import load_run_file
from protocol.errors import DataError, ManifestError, MissingFileError, MurmurError, UnreachableError, UsageError
from protocol.manifest.model import ModelSection
from protocol.signing import sign_manifest
from tests.node.model.pretrained_folders import KINDS, sizes_of, write_manifest
from tests.node.small_run import MANIFEST, PEERS

LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"type": "yarn", "factor": 4.0}


def section(folder: Path, config: Any, *lines: str) -> ModelSection:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return load_run_file(write_manifest(folder, 'config = "config.json"', *lines)).manifest.model


def config_of(kind: str, **changes: object) -> dict[str, Any]:
    return dict(AutoConfig.for_model(kind, **sizes_of(kind)).to_dict()) | changes


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_come_from_config_json_and_go_back_into_it(tmp_path: Path, kind: str) -> None:
    theirs = config_of(kind, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})
    model = section(tmp_path, theirs, "context = 16")
    assert (model.vocabulary, model.width, model.layers) == (256, 32, 2)
    assert model.hidden == theirs.get("moe_intermediate_size", 48)
    assert (model.heads, model.kv_heads, model.head_size) == (4, 2, 16)
    assert (model.context, model.tied, model.rope_theta, model.norm_epsilon) == (16, False, 500_000.0, 1e-6)
    written = model_family(model).hugging_face_config(model)
    assert section(tmp_path, written) == model
    unused = {"architectures", "rope_theta", *(["intermediate_size"] if kind == "qwen3_moe" else [])}
    known = {key: theirs[key] for key in (written.keys() & theirs.keys()) - unused}
    assert {key: written[key] for key in known} == known | {"max_position_embeddings": 16}


def test_scaled_positions_come_from_either_table_and_go_back(tmp_path: Path) -> None:
    theirs = {key: value for key, value in config_of("llama").items() if not key.startswith("rope")}
    tables = [LLAMA_3 | {"rope_theta": 5e5}, {"rope_type": "linear", "factor": 2.0}, YARN]
    for name, table in itertools.product(("rope_parameters", "rope_scaling"), tables):
        model = section(tmp_path, theirs | {name: table}, "context = 16")
        assert model.rope_scaling is not None
        assert model.rope_scaling.rope_type == table.get("rope_type", "yarn") and model.rope_scaling.factor > 1
        written = model_family(model).hugging_face_config(model)
        assert section(tmp_path, written) == model
    assert model.rope_scaling is not None
    assert model.rope_scaling.original_max_position_embeddings == 32, "of the file, not of the shorter context"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, r"the architecture mamba is not supported; use one of LlamaForCausalLM, Olmo2"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, r"the architecture Qwen3ForSequenceClassification is"),
        ({"model_type": ["qwen3"]}, r"the architecture .* is not supported"),
        ({"hidden_size": None}, r"the key hidden_size is missing"),
        ({"hidden_act": "gelu"}, r'hidden_act = "gelu" is not supported, only "silu"'),
        ({"attention_bias": True}, r"attention_bias = true is not supported, only false"),
        ({"use_sliding_window": True, "sliding_window": 64}, r"use_sliding_window = true .*; a sliding_window is not"),
        ({"layer_types": ["sliding_attention"] * 2}, r"layer_types other than full_attention are not supported"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4}},
            r"type dynamic is not supported, only default",
        ),
        ({"rope_scaling": YARN | {"mscale": 1}}, r"rope_scaling has the key mscale, which is not supported"),
        ({"rope_parameters": LLAMA_3, "rope_scaling": YARN}, r"rope_scaling and rope_parameters differ; remove one"),
        ({"rope_theta": 3e4, "rope_parameters": {"rope_theta": 2e4}}, r"rope_theta is 30000.0 and 20000.0, of which"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, r"rope_type llama3 needs low_freq_factor; add it"),
        ({"rope_parameters": LLAMA_3 | {"beta_fast": 3}}, r"rope_type llama3 has no beta_fast; remove it"),
        ({"rope_parameters": LLAMA_3 | {"factor": "8"}}, r"model\.rope_scaling\.factor: must be a number"),
        ({"rope_parameters": LLAMA_3 | {"high_freq_factor": 0.5}}, r"low_freq_factor must be below high_freq_factor"),
        ({"rope_parameters": YARN, "rope_theta": 1}, r"rope_theta must be above 1 with rope_scaling of the type yarn"),
        ({"rope_scaling": 3}, r"rope_scaling is not a table"),
        ({"quantization_config": {"bits": 4}}, r"the key quantization_config is not known; remove it"),
        ({"hidden_size": "wide"}, r"model\.width: must be a whole number"),
        ({"num_attention_heads": 3}, r"heads must be a multiple of kv_heads"),
        ({f"key_{number}": 1 for number in range(9)}, r"key_0 .*key_4 .*; and 4 more$"),
    ],
)
def test_what_cannot_be_trained_is_one_line(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ManifestError, match=words) as caught:
        section(tmp_path, config_of("qwen3", **changes))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1500


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"a": "' + "b" * 2**20 + '"}'])
def test_file_that_is_no_config_json(tmp_path: Path, text: str) -> None:
    with pytest.raises(ManifestError, match=r"config\.json is not a JSON object of at most"):
        section(tmp_path, text)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            ['config = "config.json"', "width = 64"],
            r"model\.width \(line 6\): comes from config\.json; remove this key",
        ),
        (['config = "config.json"', "context = 33"], r"model\.context \(line 6\): config\.json has 32; write at most"),
        (['config = "config.json"', "subspace = 4"], r"model\.subspace \(line 6\): must be at least 8"),
        (['from = "."', "subspace = 8"], r"model\.subspace \(line 6\): cannot be combined with pretrained weights"),
        (['config = "config.json"', "context = 'x'"], r"model\.context \(line 6\): must be a whole number"),
        (["config = 3"], r"model\.config \(line 5\): must be text"),
        (['config = "config.json"', 'from = "."'], r"model\.config \(line 5\): model\.from has its own config\.json"),
    ],
)
def test_keys_that_do_not_go_together_are_named_with_their_line(tmp_path: Path, lines: list[str], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama")))
    with pytest.raises(ManifestError, match=words):
        load_run_file(write_manifest(tmp_path, *lines))


def test_only_a_file_of_ones_own_may_name_other_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama")))
    signed = sign_manifest(MANIFEST, PEERS[0]).replace(b"[model]", b'[model]\nconfig = "config.json"')
    (tmp_path / "run.toml").write_bytes(signed)
    with pytest.raises(MurmurError, match="the text is not what"):
        load_run_file(tmp_path / "run.toml")
    with pytest.raises(MissingFileError, match=r"cannot read .*other\.json"):
        load_run_file(write_manifest(tmp_path, 'config = "other.json"'))


def test_hub_is_asked_only_where_the_user_allows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(weight_files.ALLOWED, raising=False)
    with pytest.raises(UsageError, match=r"set MURMUR_ALLOW_HUB=1 to download them"):
        load_run_file(write_manifest(tmp_path, 'from = "hf:birds/starling@main"'))
    monkeypatch.setenv(weight_files.ALLOWED, "1")
    with pytest.raises(UnreachableError, match=r"cannot download birds/starling@main .*check the name and the network"):
        load_run_file(write_manifest(tmp_path, 'from = "hf:birds/starling@main"'))
    for name in ("hf:birds/starling", "hf:a/b/c@main", "hf:@main", "hf:../x@main"):
        with pytest.raises(UsageError, match=r"is not hf:NAME@REVISION"):
            load_run_file(write_manifest(tmp_path, f'from = "{name}"'))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match=r"pip install"):
        load_run_file(write_manifest(tmp_path, 'from = "hf:birds/starling@main"'))


HARMLESS = {
    "is_llama_config": True,
    "rope_interleaved": False,
    "transformers.js_config": {"dtype": "q4"},
    "_attn_implementation_autoset": True,
    "unsloth_fixed": True,
    "tokenizer_class": "LlamaTokenizer",
    "torchscript": False,
    "sep_token_id": None,
    "partial_rotary_factor": 1.0,
    "output_router_logits": False,
    "pruned_heads": {},
    "top_p": 0.9,
}


def test_keys_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    """Small models that people start from have them: SmolLM2, fine-tunes of transformers 4.46, files of unsloth."""
    plain = section(tmp_path, config_of("llama"))
    for name, value in HARMLESS.items():
        assert section(tmp_path, config_of("llama", **{name: value})) == plain, name
    for name, value in (("rope_interleaved", True), ("partial_rotary_factor", 0.5), ("pruned_heads", {"0": [1]})):
        with pytest.raises(ManifestError, match=name):
            section(tmp_path, config_of("llama", **{name: value}))

"""Generated folders of weights, modules and texts: what we read is what transformers and torch read, or is refused."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig

import murmuration
from node.daemon.checkpoints.trained_weights import TrainedWeights
from node.data.tokenizer import ByteTokenizer
from node.model import build_model, shapes_of
from node.model.export import write_export
from node.model.weight_files import start_weights
from node.run_file import load_run_file
from protocol.errors import MurmurError
from tests.node.model.pretrained_folders import KINDS, save_model, write_manifest

pytestmark = pytest.mark.slow
torch.set_num_threads(1)

EXAMPLES = int(os.environ.get("MURMUR_EXAMPLES", "12"))  # 60 in `make nightly`
PHASES = (Phase.explicit, Phase.generate)  # to shrink takes minutes
FEW = settings(max_examples=EXAMPLES, deadline=None, derandomize=True, phases=PHASES)
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
# Keys of config.json that people's files have: some change what a model computes, some do not.
MORE_KEYS: Mapping[str, tuple[Any, ...]] = {
    "is_llama_config": (True,),
    "rope_interleaved": (False, True),
    "transformers.js_config": ({"dtype": "q4"},),
    "_attn_implementation_autoset": (True,),
    "unsloth_fixed": (True,),
    "tokenizer_class": ("LlamaTokenizer",),
    "torchscript": (False,),
    "sep_token_id": (None, 3),
    "partial_rotary_factor": (1.0, 0.5),
    "pretraining_tp": (1,),
    "use_cache": (False,),
    "attention_bias": (False, True),
    "mlp_bias": (False, True),
    "hidden_act": ("silu", "gelu", "relu"),
    "rope_theta": (10_000.0, 500_000.0),
    "rms_norm_eps": (1e-6, 1e-5),
    "sliding_window": (None, 8),
    "tie_word_embeddings": (False, True),
    "head_dim": (16, 8),
}
KEYS = st.sampled_from([(key, value) for key, values in MORE_KEYS.items() for value in values])
CHANGES = ("another head", "a name in two shards", "a file beside the index", "nothing")


def our_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Raises MurmurError if we refuse the folder."""
    manifest = load_run_file(write_manifest(folder.parent, f'from = "{folder.name}"')).manifest
    weights = start_weights(manifest, folder.parent)
    assert weights is not None
    model = build_model(manifest.model)
    model.load_flat(weights)
    with torch.no_grad():
        logits: torch.Tensor = model(tokens)
    return logits


def their_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(tokens).logits
    return logits


def change_files(folder: Path, change: str) -> None:
    """Make the files contradict each other, as files of the hub do; another head is one of a model that has none."""
    shards = sorted(folder.glob("*.safetensors"))
    if change == "another head" and not any("lm_head.weight" in load_file(shard) for shard in shards):
        values = load_file(shards[-1])
        width = load_file(shards[0])["model.embed_tokens.weight"].shape
        save_file(values | {"lm_head.weight": torch.randn(width)}, shards[-1], {"format": "pt"})
        if (folder / INDEX).exists():
            index = json.loads((folder / INDEX).read_text())
            index["weight_map"]["lm_head.weight"] = shards[-1].name
            (folder / INDEX).write_text(json.dumps(index))
    elif change == "a name in two shards" and len(shards) > 1:
        name, first = next(iter(load_file(shards[0]).items()))
        save_file(load_file(shards[-1]) | {name: torch.randn_like(first)}, shards[-1], {"format": "pt"})
    elif change == "a file beside the index" and len(shards) > 1:
        every = {name: value for shard in shards for name, value in load_file(shard).items()}
        save_file({name: value + 0.1 for name, value in every.items()}, folder / WHOLE, {"format": "pt"})


@FEW
@given(
    kind=st.sampled_from(KINDS),
    layers=st.integers(1, 3),
    tied=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    shard=st.sampled_from(["1GB", "20KB"]),
    change=st.sampled_from(CHANGES),
    more=st.lists(KEYS, max_size=2),
    seed=st.integers(0, 99),
)
def test_logits_of_a_folder_are_those_of_transformers_or_it_is_refused(
    kind: str, layers: int, tied: bool, dtype: torch.dtype, shard: str, change: str, more: list[Any], seed: int
) -> None:
    """The index says which of two shards a name is from, which transformers 5 does not read: it takes the last one."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "weights"
        save_model(folder, kind, dtype, shard, num_hidden_layers=layers, tie_word_embeddings=tied)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | dict(more)))
        torch.manual_seed(seed)
        tokens = torch.randint(0, 256, (2, 24))
        shutil.copytree(folder, by_index := folder.with_name("by index"))
        change_files(folder, change)
        try:
            ours = our_logits(folder, tokens)
        except MurmurError as error:
            assert (change, more) != ("nothing", []), f"a plain folder is refused: {error}"
            return
        theirs = their_logits(by_index if change == "a name in two shards" else folder, tokens)
        assert torch.allclose(ours, theirs, atol=1e-3), (change, more)


@FEW
@given(
    constants=st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=3),
    spreads=st.lists(st.floats(0.015625, 1, width=32), min_size=1, max_size=3),
    width=st.integers(1, 40),
)
def test_described_parameters_begin_as_torch_began_them(
    constants: list[float], spreads: list[float], width: int
) -> None:
    """A constant stays as it is; a random parameter keeps its spread."""
    torch.manual_seed(0)
    module = nn.Module()
    for number, value in enumerate(constants):
        module.register_parameter(f"constant{number}", nn.Parameter(torch.full((width, number + 1), value)))
    for number, spread in enumerate(spreads):
        module.register_parameter(f"random{number}", nn.Parameter(torch.randn(width, 200) * spread))
    with TemporaryDirectory() as temporary:
        murmuration.describe(module, Path(temporary) / "shapes.json")
        run = write_manifest(Path(temporary), 'kind = "custom"', 'tensors = "shapes.json"')
        run.write_text(run.read_text().replace('source = "text"\npath = "corpus.txt"', 'source = "own"'))
        manifest = load_run_file(run).manifest
        flat = start_weights(manifest, Path(temporary))
    assert flat is not None
    views = shapes_of(manifest).views(flat)
    for number, value in enumerate(constants):
        assert torch.allclose(views[f"constant{number}"], torch.tensor(value), rtol=1e-6, atol=0), value
    for number, spread in enumerate(spreads):
        assert float(views[f"random{number}"].std()) == pytest.approx(spread, rel=0.4)


def test_export_samples_every_token_as_generate_does(tmp_path: Path) -> None:
    """transformers adds a top_k of its own to what a file leaves out, so the file says all that cuts tokens."""
    save_model(tmp_path / "weights", "llama")
    manifest = load_run_file(write_manifest(tmp_path, 'from = "weights"')).manifest
    weights = start_weights(manifest, tmp_path)
    assert weights is not None
    write_export(TrainedWeights(manifest, 7, weights), ByteTokenizer(), tmp_path / "out")
    settings_read = GenerationConfig.from_pretrained(tmp_path / "out")
    assert settings_read.do_sample and settings_read.top_k in (0, None) and settings_read.top_p in (1.0, None)
    said = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert said["top_k"] == 0 and said["top_p"] == 1.0
    shutil.rmtree(tmp_path / "out")

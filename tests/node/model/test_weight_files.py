"""A run that starts from the weights of a folder begins with their loss, and says all that is wrong with them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from node.daemon.checkpoints.trained_weights import TrainedWeights
from node.data.tokenizer import ByteTokenizer
from node.model import all_cuts, build_model, stage_slice
from node.model.export import write_export
from node.model.weight_files import start_weights
from node.run_file import load_run_file
from node.trainer.inner_step import validation_loss
from protocol.errors import CheckpointError, ManifestError
from protocol.manifest.reading import parse_manifest
from protocol.manifest.run import Manifest
from protocol.signing import open_signed_manifest, sign_manifest
from tests.node.model.pretrained_folders import KINDS, save_model, write_manifest
from tests.node.small_run import PEERS

torch.set_num_threads(1)


def opened(folder: Path, *more: str) -> Manifest:
    return load_run_file(write_manifest(folder, 'from = "weights"', *more)).manifest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved", ["whole", "shards in bf16, tied"])
def test_first_validation_loss_is_the_one_of_the_file(tmp_path: Path, kind: str, saved: str) -> None:
    is_whole = saved == "whole"
    dtype, shard = (torch.float32, "1GB") if is_whole else (torch.bfloat16, "20KB")
    theirs = save_model(tmp_path / "weights", kind, dtype, shard, tie_word_embeddings=not is_whole)
    assert is_whole == (tmp_path / "weights" / "model.safetensors").exists()
    manifest = opened(tmp_path, "context = 16")
    assert manifest.model.kind == kind.replace("_", "-") and manifest.model.context == 16
    weights = start_weights(manifest, tmp_path)
    assert weights is not None
    windows = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(0))
    loss, _ = validation_loss(build_model(manifest.model), weights, [windows])
    with torch.no_grad():
        logits = theirs(windows[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert loss == pytest.approx(float(expected), abs=1e-5) and loss > 5.6, "random weights guess worse than 1 in 256"


@pytest.mark.parametrize("kind", KINDS)
def test_export_is_a_folder_to_start_from_with_any_number_of_stages(tmp_path: Path, kind: str) -> None:
    save_model(tmp_path / "weights", kind, num_hidden_layers=3)
    first = opened(tmp_path)
    weights = start_weights(first, tmp_path)
    assert weights is not None
    write_export(TrainedWeights(first, 7, weights * 0.5), ByteTokenizer(), tmp_path / "next" / "weights")
    second = opened(tmp_path / "next")
    assert second.model.model_copy(update={"weights": first.model.weights}) == first.model
    assert second.model.weights != first.model.weights and second.run_id != first.run_id
    for stages in (1, 2, 3):
        parts = [start_weights(second, tmp_path / "next", cut) for cut in all_cuts(stages)]
        for cut, part in zip(all_cuts(stages), parts, strict=True):
            assert part is not None and torch.equal(part, (weights * 0.5)[stage_slice(second.model, cut)])


def test_run_id_depends_on_the_weights_and_not_on_their_place(tmp_path: Path) -> None:
    save_model(tmp_path / "weights", "qwen3")
    first = opened(tmp_path)
    (tmp_path / "weights").rename(tmp_path / "elsewhere")
    moved = load_run_file(write_manifest(tmp_path, f'from = "{tmp_path}/elsewhere"')).manifest
    assert moved.run_id == first.run_id and moved.model.from_ != first.model.from_
    weights = load_file(tmp_path / "elsewhere" / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, tmp_path / "elsewhere" / "model.safetensors")
    changed = load_run_file(tmp_path / "run.toml").manifest
    assert changed.run_id != first.run_id
    with pytest.raises(CheckpointError, match="has other weights than this run began with"):
        start_weights(moved, tmp_path)
    assert start_weights(changed, tmp_path) is not None


def test_others_get_the_hashes_and_not_the_place(tmp_path: Path) -> None:
    save_model(tmp_path / "weights", "qwen3")
    manifest = opened(tmp_path)
    published = open_signed_manifest(sign_manifest(manifest, PEERS[0]), "here").manifest
    assert published.run_id == manifest.run_id and published.model.from_ == ""
    assert start_weights(published, tmp_path) is None, "peers must send them"
    assert parse_manifest(manifest.to_toml().encode(), "again") == manifest
    with pytest.raises(ManifestError, match=r"model\.from \(line 5\): needs weights, which"):
        parse_manifest(write_manifest(tmp_path, 'from = "weights"').read_bytes().replace(b"[data]", SIZES), "a peer's")


SIZES = b"width = 32\nlayers = 2\nheads = 4\nhidden = 48\ncontext = 16\n[data]"


def test_many_faults_are_counted(tmp_path: Path) -> None:
    save_model(tmp_path / "weights", "qwen3", num_hidden_layers=2)
    config = json.loads((tmp_path / "weights" / "config.json").read_text())
    (tmp_path / "weights" / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": 40, "layer_types": None})
    )
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.q_proj\.weight is missing; .*; and 413 more$"):
        opened(tmp_path)


def test_shared_output_matrix_must_be_the_embedding(tmp_path: Path) -> None:
    """transformers would take the matrix of the file, so to start from the shared one is another model."""
    save_model(tmp_path / "weights", "llama", tie_word_embeddings=True)
    file = tmp_path / "weights" / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file)
    opened(tmp_path)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        opened(tmp_path)


def test_index_decides_between_two_shards_with_the_same_tensor(tmp_path: Path) -> None:
    save_model(tmp_path / "weights", "llama", shard="20KB")
    first = opened(tmp_path)
    index = json.loads((tmp_path / "weights" / "model.safetensors.index.json").read_text())["weight_map"]
    shards = sorted(set(index.values()))
    name = next(name for name, shard in index.items() if shard == shards[0])
    last = tmp_path / "weights" / shards[-1]
    save_file(load_file(last) | {name: torch.ones(load_file(tmp_path / "weights" / shards[0])[name].shape)}, last)
    assert opened(tmp_path).model.weights == first.model.weights
    tensors = load_file(last)
    del tensors[next(name for name, shard in index.items() if shard == shards[-1])]
    save_file(tensors, last)
    with pytest.raises(CheckpointError, match="is missing"):
        opened(tmp_path)


def test_single_file_of_another_model_beside_an_index_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "weights", "llama", shard="20KB")
    save_file({"lm_head.weight": torch.ones(2)}, tmp_path / "weights" / "model.safetensors")
    with pytest.raises(CheckpointError, match="has model.safetensors and also shards"):
        opened(tmp_path)

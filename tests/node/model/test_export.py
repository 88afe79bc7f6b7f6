"""The export against transformers itself: the same logits, the same bytes back from the tokenizer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from node.daemon.checkpoints.checkpoint import Checkpoint, SavedChain, save
from node.daemon.checkpoints.tensor_file import write_file
from node.data.tokenizer import byte_tokenizer_json
from node.model import build_model, shape_table
from node.model import export as module
from node.model.export import export
from node.model.families import FAMILIES
from protocol.errors import CheckpointError, MissingFileError, StorageError, UsageError
from protocol.manifest.run import Manifest

torch.set_num_threads(1)
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
TEXTS = ["def main():\n    return 0\n", "Grüße, 世界! 🐦", "", "  two  spaces\t", "<0x41> and \x00 and </s>"]


def manifest(model: Mapping[str, object] | None = None, tokenizer: str = "") -> Manifest:
    sizes = {"vocabulary": 256, "width": 32, "layers": 2, "heads": 4, "hidden": 48, "context": 16, **(model or {})}
    return Manifest.model_validate(
        {
            "run": {"name": "starlings"},
            "model": sizes,
            "data": {"source": "python-stdlib", "tokenizer": tokenizer},
            "train": {"batch_tokens": sizes["context"], "learning_rate": 0.1},
            "method": {"recipe": "diloco"},
        }
    )


def node_folder(folder: Path, run: Manifest) -> torch.Tensor:
    """A node's folder with one checkpoint, whose anchor is returned."""
    shapes = shape_table(run.model)
    anchor = torch.randn(shapes.numel, generator=torch.Generator().manual_seed(3)) / 4
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(run.to_toml())
    checkpoint = Checkpoint(run.run_id, shapes.hash(), 5, bytes(32), SavedChain({}, b""), anchor, {}, {}, {})
    save(folder / "checkpoints", checkpoint, shapes, keep=1)
    return anchor


MODELS: dict[str, dict[str, object]] = {
    "tied": {},
    "untied": {"tied": False},
    "grouped": {"kv_heads": 2},
    "one key head": {"kv_heads": 1, "tied": False, "rope_theta": 500.0},
    "wide heads": {"head_size": 6, "norm_epsilon": 1e-3},
    "qwen3": {"kind": "qwen3", "kv_heads": 2, "head_size": 16, "norm_epsilon": 1e-6},
    "qwen3 untied": {"kind": "qwen3", "tied": False, "rope_theta": 500.0},
    "llama3 scaling": {"rope_scaling": LLAMA_3},
    "linear scaling": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6},
        "kind": "qwen3",
    },
    "subspace": {"tied": False, "subspace": 8},
    "experts": {"kind": "qwen3-moe", "experts": 4, "experts_per_token": 2, "head_size": 16, "kv_heads": 2},
    "other experts": {
        "kind": "qwen3-moe",
        "experts": 6,
        "experts_per_token": 3,
        "normalize_experts": False,
        "tied": False,
    },
    "experts in a subspace": {"kind": "qwen3-moe", "experts": 4, "experts_per_token": 2, "subspace": 8, "tied": False},
    "olmo2": {"kind": "olmo2", "kv_heads": 2, "norm_epsilon": 1e-3},
    "olmo2 untied": {"kind": "olmo2", "tied": False, "head_size": 8},
}


def test_every_family_that_transformers_knows_is_compared() -> None:
    compared = {model.get("kind", "llama") for model in MODELS.values()}
    assert compared == {kind for kind, family in FAMILIES.items() if family.config_keys}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_transformers_computes_the_same_logits(tmp_path: Path, model: dict[str, object]) -> None:
    run = manifest(model)
    ours = build_model(run.model)
    ours.load_flat(node_folder(tmp_path / "node", run))
    export(tmp_path / "node", tmp_path / "out")
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.config.tie_word_embeddings == run.model.tied and theirs.dtype == torch.float32
    tokens = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected, actual = ours(tokens), theirs(tokens).logits
    assert expected.std() > 0.1
    if run.model.rope_scaling is not None:
        plain = build_model(run.model.model_copy(update={"rope_scaling": None}))
        plain.load_flat(ours.flat)
        assert (plain(tokens) - expected).abs().max().item() > 1e-3, "the scaling matters"
    assert torch.allclose(actual, expected, atol=1e-5, rtol=1e-5)


def test_auto_classes_load_the_folder_and_generate(tmp_path: Path) -> None:
    node_folder(tmp_path / "node", manifest())
    export(tmp_path / "node", tmp_path / "deep" / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "deep" / "out")
    tokens = tokenizer("def ", return_tensors="pt")
    written = model.generate(**tokens, max_new_tokens=5, pad_token_id=0)
    assert written.shape == (1, 9)
    torch.nn.init.zeros_(model.lm_head.weight)
    torch.manual_seed(0)
    first = model.generate(torch.zeros(500, 1, dtype=torch.long), max_new_tokens=1, min_new_tokens=1, pad_token_id=0)
    assert first[:, -1].unique().numel() > 150, "it samples from all tokens, as `murmur generate` does"


@pytest.mark.parametrize("text", TEXTS)
def test_byte_tokens_are_the_bytes_and_come_back(tmp_path: Path, text: str) -> None:
    node_folder(tmp_path / "node", manifest())
    export(tmp_path / "node", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens = tokenizer(text)["input_ids"]
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == text


def test_byte_tokenizer_knows_every_byte() -> None:
    tokenizer = Tokenizer.from_str(json.dumps(byte_tokenizer_json()))
    assert tokenizer.get_vocab_size() == 256
    assert [tokenizer.decode([byte]) for byte in range(128)] == [chr(byte) for byte in range(128)]
    everything = "".join(map(chr, [*range(0x100), 0x7FF, 0xFFFF, 0x10FFFF]))
    assert tokenizer.encode(everything).ids == list(everything.encode())
    assert tokenizer.decode(list(everything.encode())) == everything


def test_byte_tokenizer_marks_broken_bytes_and_keeps_the_rest() -> None:
    tokenizer = Tokenizer.from_str(json.dumps(byte_tokenizer_json()))
    assert tokenizer.decode([0x41, 0xFF, *"é".encode(), 0xC3, 0x42]) == "A\ufffdé\ufffdB"


def test_a_run_with_its_own_tokenizer_passes_it_on(tmp_path: Path) -> None:
    own = Tokenizer(models.WordLevel({"bird": 0, "sky": 1, "?": 2}, unk_token="?"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    node_folder(tmp_path / "node", manifest(tokenizer="words.json"))
    with pytest.raises(MissingFileError, match="no tokenizer file"):
        export(tmp_path / "node", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    own.save(str(tmp_path / "node" / "words.json"))
    export(tmp_path / "node", tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("sky bird fish")["input_ids"] == [1, 0, 2]


def test_the_folder_is_complete_readable_and_says_where_it_is_from(tmp_path: Path) -> None:
    run = manifest()
    node_folder(tmp_path / "node", run)
    (tmp_path / "out").mkdir()  # an empty one is taken
    export(tmp_path / "node", tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o444 == 0o444
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# starlings" in card and "round 5" in card and run.run_id in card
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    node_folder(tmp_path / "node", manifest())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    for taken in (tmp_path / "out", tmp_path / "out" / "thesis.txt"):
        with pytest.raises(UsageError, match="name a new one"):
            export(tmp_path / "node", taken)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    node_folder(tmp_path / "node", manifest())
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot write"):
        export(tmp_path / "node", tmp_path / "file" / "out")


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node_folder(tmp_path / "node", manifest())
    (tmp_path / "mine").mkdir()

    def full(path: Path, *content: Any) -> None:
        if path.name == "tokenizer.json":
            raise OSError(28, "No space left on device")
        write_file(path, *content)

    monkeypatch.setattr(module, "write_file", full)
    for out in (tmp_path / "mine", tmp_path / "deep" / "out"):
        with pytest.raises(StorageError, match="No space left on device; free some space"):
            export(tmp_path / "node", out)
    assert not list((tmp_path / "mine").iterdir()) and not (tmp_path / "deep").exists()


def test_config_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it nothing loads the folder, so a killed export does not look whole."""
    node_folder(tmp_path / "node", manifest())
    written: list[str] = []

    def note(path: Path, *content: Any) -> None:
        written.append(path.name)
        write_file(path, *content)

    monkeypatch.setattr(module, "write_file", note)
    export(tmp_path / "node", tmp_path / "out")
    assert len(written) == 6 and written[-1] == "config.json"
    (tmp_path / "out" / "config.json").unlink()
    with pytest.raises(ValueError, match="config.json"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_link_and_the_current_folder_are_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node_folder(tmp_path / "node", manifest())
    for name in ("real", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "here")
    for out, folder in ((Path("."), "here"), (tmp_path / "link", "real")):
        export(tmp_path / "node", out)
        assert (tmp_path / folder / "config.json").exists() and len(list((tmp_path / folder).iterdir())) == 6


def test_nothing_to_export(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        export(tmp_path, tmp_path / "out")
    (tmp_path / "run.toml").write_text(manifest().to_toml())
    with pytest.raises(CheckpointError, match="none yet"):
        export(tmp_path, tmp_path / "out")

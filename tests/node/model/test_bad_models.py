"""What is wrong with the model of a run: one line that says what to do, with the documented exit code.

Each case is a folder of a small random model with one thing wrong; `murmur up --dry-run` opens it in this process.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from node.commands.console import run_guarded
from node.commands.up.up import UpOptions, up
from node.model import weight_files
from protocol import errors
from tests.node.model.pretrained_folders import save_model, write_manifest

INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a folder with several shards."""
    folder = tmp_path_factory.mktemp("sound")
    save_model(folder, "qwen3", shard="20KB")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_run(folder: Path, files: dict[str, bytes]) -> None:
    """Write the manifest and the folder that it starts from."""
    write_manifest(folder, 'from = "weights"')
    (folder / "weights").mkdir()
    for name, content in files.items():
        (folder / "weights" / name).write_bytes(content)


def edit(name: str, **changes: Any) -> Damage:
    """Change keys of a JSON file; None removes one."""

    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))

    return change


def text(name: str, content: str) -> Damage:
    return lambda folder: (folder / name).write_text(content)


def shard_of(folder: Path, name: str = NORM) -> Path:
    return folder / str(json.loads((folder / INDEX).read_text())["weight_map"][name])


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Change the tensors of the shard with the final norm."""

    def rewrite(folder: Path) -> None:
        weights = load_file(shard_of(folder))
        change(weights)
        save_file(weights, shard_of(folder))

    return rewrite


def place(name: str) -> Damage:
    """Let the index say that a tensor is in another file."""

    def change(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][NORM] = name
        (folder / INDEX).write_text(json.dumps(index))

    return change


def truncate(count: int) -> Damage:
    return lambda folder: shard_of(folder).write_bytes(shard_of(folder).read_bytes()[:count])


def run_of(*model: str, more: str = "") -> Damage:
    """Write another manifest beside the folder."""

    def write(folder: Path) -> None:
        path = write_manifest(folder.parent, *(model or ('from = "weights"',)))
        path.write_text(path.read_text() + more)

    return write


def remove_weights(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()


NOT_JSON = r"config\.json is not a JSON object of at most 1048576 bytes; name a config\.json of Hugging Face"
CASES: tuple[tuple[str, Damage, type[errors.MurmurError], str], ...] = (
    (
        "another architecture",
        edit("config.json", model_type="gpt2", architectures=["GPT2LMHeadModel"]),
        errors.ManifestError,
        r"the architecture GPT2LMHeadModel is not supported; use one of LlamaForCausalLM, Olmo2ForCausalLM",
    ),
    ("config not JSON", text("config.json", "{"), errors.ManifestError, NOT_JSON),
    ("config deep", text("config.json", "[" * 100_000), errors.ManifestError, NOT_JSON),
    ("config huge", text("config.json", '{"a": "' + "b" * 2**21 + '"}'), errors.ManifestError, NOT_JSON),
    (
        "config lacks a size",
        edit("config.json", hidden_size=None),
        errors.ManifestError,
        r"the key hidden_size is missing",
    ),
    (
        "size of the wrong type",
        edit("config.json", hidden_size="wide"),
        errors.ManifestError,
        r"model\.width: must be a whole number",
    ),
    ("size out of bounds", edit("config.json", vocab_size=2**40), errors.ManifestError, r"vocabulary: must be at most"),
    (
        "too many experts",
        run_of(
            'kind = "qwen3-moe"',
            "width = 8",
            "layers = 1024",
            "heads = 1",
            "hidden = 8",
            "context = 2",
            "experts = 1024",
            "experts_per_token = 1",
        ),
        errors.ManifestError,
        r"model\.experts \(line 11\): of all layers together must be at most 65536",
    ),
    (
        "vocabulary above the embedding",
        edit("config.json", vocab_size=300),
        errors.CheckpointError,
        r"embed_tokens\.weight has the shape \[256, 32\] instead of \[300, 32\]; lm_head\.weight has",
    ),
    (
        "missing shard",
        lambda folder: shard_of(folder).unlink(),
        errors.MissingFileError,
        r"the shard model-0000\d-of-0000\d\.safetensors is missing; download all",
    ),
    (
        "missing tensor",
        tensors(lambda weights: weights.pop(NORM)),
        errors.CheckpointError,
        r"model\.norm\.weight is missing$",
    ),
    (
        "extra tensor",
        tensors(lambda weights: weights.update({"model.norm.bias": torch.zeros(32)})),
        errors.CheckpointError,
        r"model\.norm\.bias is not a part of the model$",
    ),
    (
        "wrong shape",
        tensors(lambda weights: weights.update({NORM: torch.zeros(48)})),
        errors.CheckpointError,
        r"model\.norm\.weight has the shape \[48\] instead of \[32\]$",
    ),
    (
        "wrong type",
        tensors(lambda weights: weights.update({NORM: torch.zeros(32, dtype=torch.int64)})),
        errors.CheckpointError,
        r"model\.norm\.weight has the type I64, not one of F32, BF16, F16$",
    ),
    (
        "not finite",
        tensors(lambda weights: weights.update({NORM: torch.full((32,), torch.inf)})),
        errors.CheckpointError,
        r"model\.norm\.weight in .* has values that are not finite; use other weights",
    ),
    ("elements cut off", truncate(-7), errors.CheckpointError, r"cannot be read \(.*\); download it again$"),
    ("header cut off", truncate(30), errors.CheckpointError, r"cannot be read \(.*\); download it again$"),
    ("empty shard", truncate(0), errors.CheckpointError, r"cannot be read \(.*\); download it again$"),
    ("index without places", text(INDEX, "{}"), errors.CheckpointError, r"index\.json is not an index of shards"),
    ("index not JSON", text(INDEX, "{{"), errors.CheckpointError, r"index\.json is not an index of shards"),
    ("index deep", text(INDEX, "[" * 100_000), errors.CheckpointError, r"index\.json is not an index of shards"),
    (
        "index names no file",
        place("gone.safetensors"),
        errors.MissingFileError,
        r"the shard gone\.safetensors is missin",
    ),
    (
        "index names a folder above",
        place("../other.safetensors"),
        errors.CheckpointError,
        r"names files in other folders",
    ),
    ("index names a folder", place(".."), errors.CheckpointError, r"names files in other folders|cannot be read"),
    (
        "no folder",
        run_of('from = "nowhere"'),
        errors.MissingFileError,
        r"cannot read .*nowhere/config\.json: No such file",
    ),
    (
        "no weights in the folder",
        remove_weights,
        errors.MissingFileError,
        r"neither model\.safetensors nor .*; save it as safetensors",
    ),
    (
        "hub without permission",
        run_of('from = "hf:birds/starling@main"'),
        errors.UsageError,
        r"set MURMUR_ALLOW_HUB=1 to download them from the Hugging Face hub, or name a folder",
    ),
    (
        "hub without a revision",
        run_of('from = "hf:birds/starling"'),
        errors.UsageError,
        r"is not hf:NAME@REVISION; name a revision, such as a commit",
    ),
    (
        "unknown optimizer",
        run_of(more='inner = { kind = "adamx" }\n'),
        errors.ManifestError,
        r"method\.inner.*'adamx'.*(adamw|muon)",
    ),
    (
        "option of another optimizer",
        run_of(more='inner = { kind = "adamw", orthogonal = 3 }\n'),
        errors.ManifestError,
        r"method\.inner.*orthogonal",
    ),
    (
        "unknown kind",
        run_of('kind = "mamba"', "width = 8", "layers = 1", "heads = 1", "hidden = 8", "context = 2"),
        errors.ManifestError,
        r"model\.kind.*'mamba'.*known kinds: custom, llama",
    ),
)  # name, damage, error, words


@pytest.mark.parametrize(("name", "damage", "error", "words"), CASES, ids=[case[0] for case in CASES])
def test_bad_model_is_one_line_that_says_what_to_do(
    tmp_path: Path,
    sound: dict[str, bytes],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    damage: Damage,
    error: type[errors.MurmurError],
    words: str,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(weight_files.ALLOWED, raising=False)
    write_run(tmp_path, sound)
    damage(tmp_path / "weights")
    code = run_guarded(lambda: up(UpOptions(run=tmp_path / "run.toml", dry_run=True)))
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if "reading the weights" not in line]
    assert code == error.exit_code and printed.out == ""
    assert len(lines) == 1 and lines[0].startswith("murmur: ") and len(lines[0]) < 1200
    assert re.search(words, lines[0]), lines[0]


def test_the_folder_of_the_cases_is_sound(
    tmp_path: Path, sound: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """Control: without damage the same command says what the run takes."""
    write_run(tmp_path, sound)
    (tmp_path / "corpus.txt").write_text("Some words of a text. " * 2000)
    assert run_guarded(lambda: up(UpOptions(run=tmp_path / "run.toml", dry_run=True))) == 0
    assert "parameters; 3 on this machine take up to" in capsys.readouterr().out

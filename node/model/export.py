"""Export of a model as a Hugging Face folder, which `AutoModelForCausalLM` and `AutoTokenizer` load.

A byte-level run gets a tokenizer whose 256 tokens are the bytes in order; any other run gets its own tokenizer.json.
The folder is written under a temporary name and renamed, so a folder that exists is complete.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from node.checkpoints.checkpoint import TrainedWeights, load_trained_weights
from node.checkpoints.tensor_file import write_tensors
from node.model.families import model_family, shape_table
from node.run_dir import tokenizer_path
from protocol.errors import MissingFileError, StorageError, UsageError
from protocol.manifest import Manifest

Json = dict[str, Any]


def export(run_dir: Path, out: Path) -> None:
    """Write the newest whole checkpoint of the node in `run_dir` as a Hugging Face folder, `out`.

    Raises:
        UsageError: `out` is not an empty folder.
        MissingFileError, CheckpointError: there is nothing to export.
        StorageError: `out` cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not an empty folder; name a new one")
    trained = load_trained_weights(run_dir)
    tokenizer = _read_tokenizer_json(run_dir, trained.manifest)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".exporting-", dir=out.parent) as staging:
            folder = Path(staging) / "model"
            folder.mkdir()
            _write_model(folder, trained, tokenizer)
            folder.rename(out)
    except (OSError, shutil.Error) as error:
        raise StorageError(f"cannot write {out}: {error}; free some space or name another folder") from error


def _write_model(folder: Path, trained: TrainedWeights, tokenizer: str) -> None:
    manifest = trained.manifest
    family, views = model_family(manifest.model), shape_table(manifest.model).views(trained.anchor)
    weights = folder / "model.safetensors"
    write_tensors(weights, {family.hugging_face_name(name): view for name, view in views.items()}, {"format": "pt"})
    weights.chmod(0o644)
    texts = {
        "config.json": _to_json(family.hugging_face_config(manifest.model)),
        "generation_config.json": _to_json({"do_sample": True, "temperature": 0.8, "bos_token_id": None}),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": _to_json(_tokenizer_config(manifest)),
        "README.md": _model_card(trained),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _read_tokenizer_json(run_dir: Path, manifest: Manifest) -> str:
    if not manifest.data.tokenizer:
        return _to_json(byte_tokenizer_json())
    path = tokenizer_path(run_dir, manifest)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise MissingFileError(f"cannot read the tokenizer {path}: {error.strerror}; put it there") from error


def byte_tokenizer_json() -> Json:
    """Return a tokenizer.json whose token n is the byte n: GPT-2's byte-level scheme without merges."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in enumerate(_bytes_to_unicode())},
            "merges": [],
        },
    }


def _bytes_to_unicode() -> list[str]:
    """Return the character for each byte: itself if it is printable Latin-1, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = map(chr, range(0x100, 0x200))
    return [chr(byte) if byte in printable else next(spare) for byte in range(256)]


def _tokenizer_config(manifest: Manifest) -> Json:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": manifest.model.context,
        "clean_up_tokenization_spaces": False,
    }


def _model_card(trained: TrainedWeights) -> str:
    manifest = trained.manifest
    title, parameters = model_family(manifest.model).title, trained.anchor.numel()
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n"
        f"# {manifest.run.name}\n\n"
        f"A {title}-type model of {parameters:,} parameters, trained by many peers with Murmuration: "
        f"recipe {manifest.method.recipe}, round {trained.round}, run `{manifest.run_id}`.\n"
    )


def _to_json(values: Json) -> str:
    return json.dumps(values, indent=2) + "\n"

"""Export of a model as a Hugging Face folder, which `AutoModelForCausalLM` and `AutoTokenizer` load, with a card.

A byte-level run gets a tokenizer whose 256 tokens are the bytes in order; any other run gets its own tokenizer.json
without the settings that training ignored. Nothing loads the folder without config.json, which is written last.
"""

import json
import re
from pathlib import Path
from typing import Any

from node.daemon.checkpoints.new_folder import fill_folder
from node.daemon.checkpoints.tensor_file import encode_tensors, write_file
from node.daemon.checkpoints.trained_weights import TrainedWeights, load_trained_weights
from node.data.tokenizer import TextTokenizer, open_node_tokenizer
from node.model.families import model_family, shape_table
from node.monitoring.progress import ByteProgress
from protocol.manifest.run import Manifest
from protocol.manifest.sections import AboutSection

Json = dict[str, Any]
READABLE = 0o644
OWN_CODE = "The names are those of the parameters in the organiser's own code, with which `load_state_dict` takes them."
LICENCE_ID = re.compile(r"[a-z0-9][a-z0-9.-]*")


def export(run_dir: Path, out: Path) -> int:
    """Write the newest whole checkpoint of the node in `run_dir` as a Hugging Face folder, `out`; return its round.

    Raises:
        UsageError: `out` is not an empty folder.
        MissingFileError, CheckpointError, DataError: there is nothing to export.
        StorageError: `out` cannot be written.
    """
    trained = load_trained_weights(run_dir)
    write_export(trained, open_node_tokenizer(run_dir, trained.manifest), out)
    return trained.round


def write_export(trained: TrainedWeights, tokenizer: TextTokenizer, out: Path) -> None:
    """Write the weights as a Hugging Face folder, `out`: a new or an empty one. Raises UsageError or StorageError."""
    manifest = trained.manifest
    family, views = model_family(manifest.model), shape_table(manifest.model).views(trained.anchor)
    named = family.hugging_face_weights(manifest.model, views)
    texts = {"README.md": model_card(trained, tokenizer, sum(weights.numel() for weights in named.values()))}
    if family.config_keys is not None:
        texts |= _transformers_files(manifest, tokenizer)
    size = sum(weights.nbytes for weights in named.values())
    with fill_folder(out) as folder, ByteProgress("exporting", size) as progress:
        chunks = progress.count(encode_tensors(named, {"format": "pt"}))
        write_file(folder / "model.safetensors", chunks, READABLE)
        for name, text in texts.items():
            write_file(folder / name, [text.encode()], READABLE)


def _transformers_files(manifest: Manifest, tokenizer: TextTokenizer) -> dict[str, str]:
    """Return the files by which transformers loads model and tokenizer, config.json last."""
    ids: Json = {f"{role}_token_id": None for role in ("bos", "eos", "pad")}
    ids |= {f"{role}_token_id": token.id for role, token in tokenizer.special_tokens.items()}
    config = model_family(manifest.model).hugging_face_config(manifest.model)
    return {
        "tokenizer.json": tokenizer.to_json(),
        "tokenizer_config.json": _to_json(_tokenizer_config(manifest.model.context, tokenizer)),
        "generation_config.json": _to_json(_generation_config(manifest.model.vocabulary, tokenizer) | ids),
        "config.json": _to_json(config | ids),
    }


def _tokenizer_config(context: int, tokenizer: TextTokenizer) -> Json:
    """Name the special tokens, except words of the vocabulary: transformers would look for these in each text."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": token.text for role, token in tokenizer.special_tokens.items() if token.is_added},
    }


def _generation_config(vocabulary: int, tokenizer: TextTokenizer) -> Json:
    """Sample as `murmur generate` does, and never an id without a token."""
    holes = sorted({*range(vocabulary)} - {*tokenizer.ids.tolist()})
    # transformers takes the 50 likeliest tokens unless told otherwise.
    return {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 0,
        "top_p": 1.0,
        **({"suppress_tokens": holes} if holes else {}),
    }


def _to_json(values: Json) -> str:
    return json.dumps(values, indent=2) + "\n"


def model_card(trained: TrainedWeights, tokenizer: TextTokenizer, parameters: int) -> str:
    """Return the card; the manifest's [about] table supplies its words.

    Args:
        parameters: number of exported weights.
    """
    manifest = trained.manifest
    family = model_family(manifest.model)
    paragraphs = [
        f"# {manifest.run.name}",
        manifest.about.description,
        f"A {family.title}-type model of {parameters:,} parameters, trained by many peers with Murmuration: "
        f"recipe {manifest.method.recipe}, round {trained.round}, run `{manifest.run_id}`.",
        *_about_lines(manifest.about),
        _text_format(manifest.model.context, tokenizer) if family.config_keys is not None else OWN_CODE,
    ]
    header = _metadata(manifest.about, family.config_keys is not None)
    return header + "\n".join(("", "\n\n".join(filter(None, paragraphs)), ""))


def _metadata(about: AboutSection, is_known: bool) -> str:
    """Return the header in YAML. A JSON string is one, so no text of the organiser can add a key."""
    lines = ["library_name: transformers", "pipeline_tag: text-generation"] if is_known else []
    licence = about.licence.strip().lower().replace(" ", "-")
    if LICENCE_ID.fullmatch(licence):
        lines.append(f"license: {json.dumps(licence)}")
    elif licence:
        lines += ["license: other", f"license_name: {json.dumps(about.licence, ensure_ascii=False)}"]
    return "\n".join(("---", *lines, "---", "")) if lines else ""


def _about_lines(about: AboutSection) -> list[str]:
    facts = {"Data": about.data, "Organiser": about.organiser, "Licence": about.licence, "More": about.url}
    return [f"**{name}:** {text}" for name, text in facts.items() if text]


def _text_format(context: int, tokenizer: TextTokenizer) -> str:
    end = tokenizer.special_tokens.get("eos")
    documents = f"`{end.text}` follows each document" if end else "No token separates documents"
    return f"The model reads at most {context:,} tokens. {documents}; no other token is added to a text."

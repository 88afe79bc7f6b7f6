"""Export of a model as a Hugging Face folder, which `AutoModelForCausalLM` and `AutoTokenizer` load, with a card.

A byte-level run gets a tokenizer whose 256 tokens are the bytes in order; any other run gets its own tokenizer.json
without the settings that training ignored. Nothing loads the folder without config.json, which is written last.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from node.daemon.checkpoints.new_folder import fill_folder
from node.daemon.checkpoints.tensor_file import encode_tensors, write_file
from node.daemon.checkpoints.trained_weights import TrainedWeights, load_trained_weights
from node.data.chat import ChatTemplate
from node.data.tokenizer import TextTokenizer, open_node_tokenizer
from node.model.adapter import WEIGHT, add_adapter
from node.model.families import model_family, shape_table
from node.model.interface import ModelFamily
from node.model.weight_files import HUB_NAME, WeightFiles, frozen_folder, is_start
from node.monitoring.status_line import ByteProgress
from node.run_dir import read_json_if_whole
from protocol.errors import CheckpointError, UsageError
from protocol.manifest.run import Manifest
from protocol.manifest.sections import AboutSection, AdapterSection

Json = dict[str, Any]
READABLE = 0o644
REPORT = "report.json"  # as node/dashboard/run_report.py writes it
OWN_CODE = "The names are those of the parameters in the organiser's own code, with which `load_state_dict` takes them."
PEFT_PREFIX = "base_model.model."
LICENCE_ID = re.compile(r"[a-z0-9][a-z0-9.-]*")


@dataclass(frozen=True)
class CardFacts:
    """Facts of the card that neither the weights nor the manifest have.

    Args:
        repository: ORG/NAME of the Hub where the folder goes; empty if it stays a folder.
        report: the report of the run at this round, as the host or `murmur up` wrote it; empty if there is none.
    """

    repository: str = ""
    report: Mapping[str, Any] = field(default_factory=dict)


NO_FACTS = CardFacts()


def export(run_dir: Path, out: Path, *, merged: bool = False, repository: str = "") -> int:
    """Write the newest whole checkpoint of the node in `run_dir` as a Hugging Face folder, `out`; return its round.

    An adapter becomes a folder of PEFT, or if `merged` the whole model that it makes.

    Args:
        repository: ORG/NAME of the Hub where the folder goes, for its card.

    Raises:
        UsageError: `out` is not an empty folder.
        MissingFileError, CheckpointError, DataError: there is nothing to export.
        StorageError: `out` cannot be written.
    """
    trained = load_trained_weights(run_dir)
    facts = CardFacts(repository, _find_report(run_dir, trained))
    if merged:
        trained = merge_adapter(trained, run_dir)
    write_export(trained, open_node_tokenizer(run_dir, trained.manifest), out, facts)
    return trained.round


def merge_adapter(trained: TrainedWeights, base: Path) -> TrainedWeights:
    """Return the whole model of a run with an adapter, from the weights as they are in its files.

    Args:
        base: a relative `model.from` starts here.

    Raises MurmurError if the run has no adapter, or this machine lacks its model.
    """
    manifest = trained.manifest
    if manifest.adapter is None:
        raise UsageError("--merged: this run has no adapter, so its model is whole; leave it out")
    factors, whole = shape_table(manifest.model).views(trained.anchor), manifest.model.with_adapter(None)
    with WeightFiles(frozen_folder(manifest.model, base), whole) as files:
        flat = files.load()
    if not is_start(whole, flat):
        raise CheckpointError(f"{manifest.model.from_} has other weights than this run's adapter changes; name those")
    add_adapter(shape_table(whole).views(flat), factors, manifest.adapter)
    return replace(trained, anchor=flat, manifest=manifest.model_copy(update={"adapter": None, "model": whole}))


def _find_report(run_dir: Path, trained: TrainedWeights) -> Json:
    """Return the report of exactly these weights, of a host in its folder or of `murmur up` in the one above."""
    found = (read_json_if_whole(folder / REPORT) for folder in (run_dir, run_dir.parent))
    wanted = (trained.manifest.run_id, trained.round)
    return next((report for report in found if (report.get("run_id"), report.get("rounds")) == wanted), {})


def write_export(trained: TrainedWeights, tokenizer: TextTokenizer, out: Path, facts: CardFacts = NO_FACTS) -> None:
    """Write the weights as a Hugging Face folder, `out`: a new or an empty one. Raises UsageError or StorageError."""
    manifest = trained.manifest
    if manifest.adapter is not None:
        _write_adapter(trained, manifest.adapter, tokenizer, out, facts)
        return
    family, views = model_family(manifest.model), shape_table(manifest.model).views(trained.anchor)
    named = family.hugging_face_weights(manifest.model, views)
    parameters = sum(weights.numel() for weights in named.values())
    texts = {"README.md": model_card(trained, tokenizer, parameters, facts)}
    if family.config_keys is not None:
        texts |= _transformers_files(manifest, tokenizer)
    size = sum(weights.nbytes for weights in named.values())
    with fill_folder(out) as folder, ByteProgress("exporting", size) as progress:
        chunks = progress.count(encode_tensors(named, {"format": "pt"}))
        write_file(folder / "model.safetensors", chunks, READABLE)
        for name, text in texts.items():
            write_file(folder / name, [text.encode()], READABLE)


def _write_adapter(
    trained: TrainedWeights, adapter: AdapterSection, tokenizer: TextTokenizer, out: Path, facts: CardFacts
) -> None:
    """Write a folder of PEFT, adapter_config.json last."""
    manifest, family = trained.manifest, model_family(trained.manifest.model)
    views = shape_table(manifest.model).views(trained.anchor)
    named = {PEFT_PREFIX + _adapter_name(family, name): view for name, view in views.items()}
    texts = {
        "README.md": model_card(trained, tokenizer, trained.anchor.numel(), facts),
        **_tokenizer_files(manifest, tokenizer),
        "adapter_config.json": _to_json(_adapter_config(manifest.model.from_, adapter)),
    }
    with fill_folder(out) as folder:
        write_file(folder / "adapter_model.safetensors", encode_tensors(named, {"format": "pt"}), READABLE)
        for name, text in texts.items():
            write_file(folder / name, [text.encode()], READABLE)


def _adapter_name(family: ModelFamily, name: str) -> str:
    """Return the name of a factor, whose matrix has the name of transformers."""
    stem, factor = name.removesuffix(WEIGHT).rsplit(".", 1)
    return f"{family.hugging_face_name(stem + WEIGHT).removesuffix(WEIGHT)}.{factor}{WEIGHT}"


def _adapter_config(source: str, adapter: AdapterSection) -> Json:
    hub = HUB_NAME.fullmatch(source)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": hub["name"] if hub else None,  # a path of this machine helps nobody else
        "revision": hub["revision"] if hub else None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": list(adapter.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _tokenizer_files(manifest: Manifest, tokenizer: TextTokenizer) -> dict[str, str]:
    """Return the tokenizer, and the chat template of a run that has one."""
    chat = manifest.data.chat
    return {
        "tokenizer.json": tokenizer.to_json(),
        "tokenizer_config.json": _to_json(_tokenizer_config(manifest, tokenizer)),
        **({"chat_template.jinja": ChatTemplate(chat).text} if chat is not None else {}),
    }


def _transformers_files(manifest: Manifest, tokenizer: TextTokenizer) -> dict[str, str]:
    """Return the files by which transformers loads model and tokenizer, config.json last."""
    ids: Json = {f"{role}_token_id": None for role in ("bos", "eos", "pad")}
    ids |= {f"{role}_token_id": token.id for role, token in tokenizer.special_tokens.items()}
    config = model_family(manifest.model).hugging_face_config(manifest.model)
    return {
        **_tokenizer_files(manifest, tokenizer),
        "generation_config.json": _to_json(_generation_config(manifest.model.vocabulary, tokenizer) | ids),
        "config.json": _to_json(config | ids),
    }


def _tokenizer_config(manifest: Manifest, tokenizer: TextTokenizer) -> Json:
    """Name the special tokens, except words of the vocabulary: transformers would look for these in each text.

    Their words are text, as in training, except where a chat template has some.
    """
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": manifest.model.context,
        "split_special_tokens": manifest.data.chat is None,
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


def model_card(trained: TrainedWeights, tokenizer: TextTokenizer, parameters: int, facts: CardFacts = NO_FACTS) -> str:
    """Return the card; the manifest's [about] table supplies its words, and the run its figures.

    Args:
        parameters: number of exported weights.
    """
    manifest = trained.manifest
    family = model_family(manifest.model)
    paragraphs = [
        f"# {manifest.run.name}",
        manifest.about.description,
        f"{_describe_kind(manifest, family.title)} of {parameters:,} parameters, trained by many peers with "
        f"Murmuration: recipe {manifest.method.recipe}, round {trained.round}, run `{manifest.run_id}`.",
        *_about_lines(manifest.about),
        _text_format(manifest.model.context, tokenizer) if family.config_keys is not None else OWN_CODE,
        _usage(facts.repository, trained.round) if family.config_keys is not None and facts.repository else "",
        _figures(trained, facts.report),
    ]
    header = _metadata(manifest, family.config_keys is not None)
    return header + "\n".join(("", "\n\n".join(filter(None, paragraphs)), ""))


def _describe_kind(manifest: Manifest, title: str) -> str:
    if manifest.adapter is None:
        return f"A {title}-type model"
    hub = HUB_NAME.fullmatch(manifest.model.from_)
    base = f"{hub['name']}@{hub['revision']}" if hub else f"a {title}-type model"
    return f"An adapter (LoRA, rank {manifest.adapter.rank}) for {base}"


def _usage(repository: str, number: int) -> str:
    """Return the lines of Python that load this revision from the Hub."""
    place = f'"{repository}", revision="round-{number}"'
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"model = AutoModelForCausalLM.from_pretrained({place})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({place})\n```"
    )


def _figures(trained: TrainedWeights, report: Mapping[str, Any]) -> str:
    """Return the table of the training; places of text on the organiser's machine are not in it."""
    train, tokens = trained.manifest.train, trained.tokens
    before, after = report.get("initial_validation_loss"), report.get("validation_loss")
    names = [
        entry.path if entry.source == "hf" else entry.name or entry.source for entry in trained.manifest.data.mixture
    ]
    rows = {
        "rounds": f"{trained.round:,}",
        "tokens of all peers": f"{tokens:,}" if tokens else "",
        "peers that contributed": f"{len(report.get('contributors', ())):,}" if report.get("contributors") else "",
        "validation loss, nats per token": f"{before:.3f} -> {after:.3f}" if before and after else "",
        "text": ", ".join(names),
        "tokens of an inner step": f"{train.batch_tokens:,}",
        "learning rate": f"{train.learning_rate:g}",
        "seed": f"{trained.manifest.run.seed}",
    }
    shown = (f"| {name} | {value} |" for name, value in rows.items() if value)
    return "\n".join(("| training | |", "|---|---|", *shown))


def _metadata(manifest: Manifest, is_known: bool) -> str:
    """Return the header in YAML. A JSON string is one, so no text of the organiser can add a key."""
    about, library = manifest.about, "transformers" if manifest.adapter is None else "peft"
    lines = [f"library_name: {library}", "pipeline_tag: text-generation"] if is_known else []
    hub = HUB_NAME.fullmatch(manifest.model.from_)
    if manifest.adapter is not None and hub:
        lines.append(f"base_model: {json.dumps(hub['name'])}")
    lines.append(f"tags: {json.dumps(['murmuration', 'decentralized-training'])}")
    texts = [entry.path for entry in manifest.data.mixture if entry.source == "hf"]
    if texts:
        lines.append(f"datasets: {json.dumps(texts, ensure_ascii=False)}")
    licence = about.licence.strip().lower().replace(" ", "-")
    if LICENCE_ID.fullmatch(licence):
        lines.append(f"license: {json.dumps(licence)}")
    elif licence:
        lines += ["license: other", f"license_name: {json.dumps(about.licence, ensure_ascii=False)}"]
    return "\n".join(("---", *lines, "---", ""))


def _about_lines(about: AboutSection) -> list[str]:
    facts = {"Data": about.data, "Organiser": about.organiser, "Licence": about.licence, "More": about.url}
    return [f"**{name}:** {text}" for name, text in facts.items() if text]


def _text_format(context: int, tokenizer: TextTokenizer) -> str:
    end = tokenizer.special_tokens.get("eos")
    documents = f"`{end.text}` follows each document" if end else "No token separates documents"
    return f"The model reads at most {context:,} tokens. {documents}; no other token is added to a text."

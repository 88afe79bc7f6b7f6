"""The model card of an export: README.md with the metadata that a model hub reads."""

import json
import re

from node.daemon.checkpoints.trained_weights import TrainedWeights
from node.data.tokenizer import TextTokenizer
from node.model.families import model_family
from protocol.manifest.sections import AboutSection

OWN_CODE = "The names are those of the parameters in the organiser's own code, with which `load_state_dict` takes them."
LICENCE_ID = re.compile(r"[a-z0-9][a-z0-9.-]*")


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

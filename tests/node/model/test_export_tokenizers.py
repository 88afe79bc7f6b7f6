"""An export gives the ids that training used and stops where a document ends, whatever the tokenizer file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from node.daemon.checkpoints.trained_weights import TrainedWeights
from node.data.tokenizer import ByteTokenizer, FileTokenizer
from node.model import initial_weights
from node.model.export import write_export
from protocol.manifest.run import Manifest
from tests.node.data.odd_tokenizers import ODD, odd_tokenizer

torch.set_num_threads(1)
TEXTS = [
    "the fox",
    "the </s> fox",
    "</S> the",
    "<s>the [PAD] <eos>x",
    "",
    "  a  b ",
    "\u00e9t\u00e9 \u4e16\u754c",
    "a\n\nb  c </s>\n",
    "[UNK] < / the",
]


def trained(vocabulary: int, about: dict[str, str] | None = None) -> TrainedWeights:
    values = {
        "run": {"name": "starlings"},
        "model": {"vocabulary": vocabulary, "width": 16, "layers": 1, "heads": 2, "hidden": 16, "context": 64},
        "data": {"source": "python-stdlib", "tokenizer": "tokenizer.json"},
        "train": {"batch_tokens": 64, "learning_rate": 0.1},
        "method": {"recipe": "diloco"},
        "about": about or {},
    }
    manifest = Manifest.model_validate(values)
    return TrainedWeights(manifest, 5, initial_weights(manifest.model, 3) * 20)


def exported(folder: Path, name: str, spare: int = 3) -> tuple[FileTokenizer, Path]:
    """A model with some ids more than the tokenizer of that name."""
    (folder / "tokenizer.json").write_text(odd_tokenizer(name))
    tokenizer = FileTokenizer(folder / "tokenizer.json")
    write_export(trained(tokenizer.size + spare), tokenizer, folder / "out")
    return tokenizer, folder / "out"


def read(folder: Path, name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / name).read_text())
    return values


@pytest.mark.parametrize("name", ODD)
def test_transformers_gives_the_ids_of_training(tmp_path: Path, name: str) -> None:
    ours, folder = exported(tmp_path, name)
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours.encode(text).tolist(), text


def test_the_file_as_it_is_would_give_others(tmp_path: Path) -> None:
    """The control of the test above."""
    ours, folder = exported(tmp_path, "template")
    (folder / "tokenizer.json").write_text(odd_tokenizer("template"))
    assert AutoTokenizer.from_pretrained(folder)("the fox")["input_ids"] != ours.encode("the fox").tolist()


def test_a_word_of_the_vocabulary_is_no_special_token(tmp_path: Path) -> None:
    """transformers would find a special token in the text before it splits the text. This is the control."""
    ours, folder = exported(tmp_path, "end in the vocabulary alone")
    assert "eos_token" not in read(folder, "tokenizer_config.json")
    assert read(folder, "config.json")["eos_token_id"] == ours.end[0] == 2
    named = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="</s>")
    assert named("the </s>")["input_ids"] != ours.encode("the </s>").tolist()


@pytest.mark.parametrize("name", ODD)
def test_configurations_agree_on_end_beginning_and_padding(tmp_path: Path, name: str) -> None:
    ours, folder = exported(tmp_path, name)
    expected = {role: token.id for role, token in ours.special_tokens.items()}
    for file in ("config.json", "generation_config.json"):
        values = read(folder, file)
        assert [values[f"{role}_token_id"] for role in ("bos", "eos", "pad")] == [
            expected.get(role) for role in ("bos", "eos", "pad")
        ]
    theirs = AutoTokenizer.from_pretrained(folder)
    if all(token.is_added for token in ours.special_tokens.values()):
        assert theirs.eos_token_id == expected.get("eos") and theirs.pad_token_id == expected.get("pad")
    assert read(folder, "config.json")["vocab_size"] == ours.size + 3


@pytest.mark.parametrize("name", ["holes", "byte fallback", "no end"])
def test_generation_takes_tokens_alone(tmp_path: Path, name: str) -> None:
    ours, folder = exported(tmp_path, name, spare=400)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.from_numpy(ours.encode("a fox").astype("int64"))[None]
    torch.manual_seed(0)
    written = {int(token) for row in model.generate(prompt.repeat(8, 1), max_new_tokens=50) for token in row}
    assert written <= set(ours.ids.tolist())
    model.generation_config.suppress_tokens = None
    model.generation_config.temperature = 3.0
    free = {int(token) for row in model.generate(prompt.repeat(8, 1), max_new_tokens=50) for token in row}
    assert not free <= set(ours.ids.tolist()), "the control: the model itself takes others"


def test_generation_ends_with_the_document(tmp_path: Path) -> None:
    ours, folder = exported(tmp_path, "plain")
    model = AutoModelForCausalLM.from_pretrained(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    prompts = theirs(["the fox", "a"], return_tensors="pt", padding=True)
    model.generation_config.suppress_tokens = [token for token in range(261) if token != ours.end[0]]
    assert model.generate(**prompts, max_new_tokens=20).shape == (2, 8), "one token: the end"
    assert theirs.padding_side == "left"


def test_bytes_have_no_special_token(tmp_path: Path) -> None:
    write_export(trained(256), ByteTokenizer(), tmp_path / "out")
    config = read(tmp_path / "out", "config.json")
    assert config["eos_token_id"] is config["bos_token_id"] is config["pad_token_id"] is None
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.eos_token_id is None
    assert "suppress_tokens" not in read(tmp_path / "out", "generation_config.json")


ABOUT = {
    "description": "Learns how starlings write. --- # no heading",
    "organiser": "The Flock",
    "licence": "Apache-2.0",
    "data": "Letters of starlings, 2019.",
    "url": "https://example.org/run",
}


def card(folder: Path, about: dict[str, str]) -> str:
    write_export(trained(256, about), ByteTokenizer(), folder / "out")
    return (folder / "out" / "README.md").read_text()


def test_the_card_has_the_words_of_the_manifest(tmp_path: Path) -> None:
    text = card(tmp_path, ABOUT)
    _, head, body = text.split("---\n", 2)
    assert 'license: "apache-2.0"\n' in head and "library_name: transformers\n" in head
    assert all(fact in body for fact in ABOUT.values()) and "# starlings\n" in body
    assert "No token separates documents" in body


@pytest.mark.parametrize(
    ("licence", "expected"),
    [("", None), ("MIT", 'license: "mit"'), ("OpenRAIL (own: words)", 'license_name: "OpenRAIL (own: words)"')],
)
def test_a_licence_of_ones_own_is_quoted(tmp_path: Path, licence: str, expected: str | None) -> None:
    head = card(tmp_path, {"licence": licence}).split("---\n")[1]
    assert expected is None or f"{expected}\n" in head
    assert ("license" in head) == (expected is not None)

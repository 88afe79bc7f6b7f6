"""Conversations are read from all kinds of files, packed whole, and only their answers are learned."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import Table, parquet

from node.data import BatchReader, Corpus, open_corpus
from node.data.batches import IGNORED, count_targets, inputs_and_targets, validation_sets
from node.data.check import read_text
from node.data.corpus import OPEN_WINDOWS, UNCOUNTED, PackedText, Shard, pack
from node.data.source import require_document_end
from node.model import build_model, initial_weights
from node.trainer.inner_step import accumulate_gradient, validation_loss
from protocol.errors import DataError
from protocol.manifest.model import ModelSection
from protocol.manifest.run import Manifest
from protocol.manifest.sections import DataSection
from tests.node.data.chats import write_talks, write_tokenizer

END = np.array([256 | UNCOUNTED], dtype=np.uint32)
MODEL: dict[str, Any] = {"vocabulary": 262, "width": 32, "layers": 1, "heads": 2, "hidden": 48, "context": 120}


def data(source: str = "text", path: str = "talks.jsonl", **values: object) -> DataSection:
    given = {"source": source, "path": path, "tokenizer": "tokenizer.json", "validation_share": 0.2, "chat": {}}
    return DataSection.model_validate(given | values)


def manifest(config: DataSection) -> Manifest:
    return Manifest.model_validate(
        {
            "run": {"name": "starlings"},
            "model": MODEL,
            "data": config.model_dump(),
            "train": {"batch_tokens": 240, "learning_rate": 0.1},
            "method": {"recipe": "diloco"},
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    write_talks(tmp_path / "talks.jsonl", 40)
    return tmp_path


def talks_in(windows: torch.Tensor) -> set[str]:
    text = "".join(chr(token) if token < 256 else "|" for token in (windows % UNCOUNTED).flatten().tolist())
    return {each for each in text.split("|") if each.startswith("assistant\ncomes ")}


def read_all(corpus: Corpus, count: int = 200) -> torch.Tensor:
    return BatchReader(corpus, MODEL["context"], 0, "me").next_batch(count)


def write_parquet(folder: Path) -> str:
    rows = [json.loads(line)["messages"] for line in (folder / "talks.jsonl").read_text().splitlines()]
    (folder / "set").mkdir()
    parquet.write_table(Table.from_pydict({"messages": rows}), folder / "set" / "train.parquet")
    return "set/train.parquet"


@pytest.mark.parametrize("source", ["text", "text parquet", "hf jsonl", "hf parquet"])
def test_all_kinds_of_files_give_the_same_conversations(folder: Path, source: str) -> None:
    if source == "text":
        config = data()
    elif source == "hf jsonl":
        write_talks(folder / "set" / "train.jsonl", 40)
        config = data("hf", "set")
    else:
        path = write_parquet(folder)
        config = data("text", path) if source.startswith("text") else data("hf", "set")
    corpus = open_corpus(config, folder)
    windows = read_all(corpus)
    held = torch.cat([batch for each in validation_sets(corpus, MODEL["context"], 10_000) for batch in each.batches])
    trained, held_out = talks_in(windows), talks_in(held)
    assert len(trained | held_out) == 40 and not trained & held_out and 2 <= len(held_out) <= 16
    assert (windows[:, 0] == int(END[0])).all()


def test_only_answers_are_targets(folder: Path) -> None:
    windows = read_all(open_corpus(data(), folder), 8)
    inputs, targets = inputs_and_targets(windows)
    assert inputs.max() < 262 and count_targets(windows) == int((targets != IGNORED).sum())
    for row in targets:
        text = "".join("." if token == IGNORED else chr(token) if token < 256 else "|" for token in row.tolist())
        learned = [piece for piece in text.split(".") if piece]
        assert learned and all(piece.startswith("comes ") and piece.endswith("|") for piece in learned)


def test_the_loss_is_the_mean_over_answers_whatever_the_microbatch(folder: Path) -> None:
    config = ModelSection(**MODEL)
    model, windows = build_model(config), read_all(open_corpus(data(), folder), 6)
    weights = initial_weights(config, 0)
    model.load_flat(weights)
    gradients = []
    for microbatch in (6, 1, 4):
        loss = accumulate_gradient(model, windows, microbatch)
        with torch.no_grad():
            logits, targets = model(windows[:, :-1] % UNCOUNTED), windows[:, 1:]
        is_answer = targets < UNCOUNTED
        expected = torch.nn.functional.cross_entropy(logits[is_answer], targets[is_answer])
        assert loss == pytest.approx(float(expected), rel=1e-5)
        gradients.append(model.attach_gradient().clone())
        model.clear_gradient()
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)
    assert validation_loss(model, weights, [windows[:4], windows[4:]])[0] == pytest.approx(float(expected), rel=1e-5)


def test_a_batch_without_answers_changes_nothing() -> None:
    config = ModelSection(**MODEL)
    model = build_model(config)
    model.load_flat(initial_weights(config, 0))
    silent = torch.full((4, 121), 65 | UNCOUNTED)
    assert accumulate_gradient(model, silent, 2) == 0
    assert not model.attach_gradient().any()
    assert validation_loss(model, model.flat.clone(), [silent]) == (0, 0)


def talk(length: int, answers: int = 1) -> Shard:
    return np.array([65 | UNCOUNTED] * (length - answers) + [66] * answers, dtype=np.uint32)


def test_conversations_are_packed_whole() -> None:
    lengths = np.random.default_rng(0).integers(2, 30, 500)
    windows = pack([talk(int(length)) for length in lengths], 40, END)
    assert windows.shape[1] == 41 and (windows[:, 0] == END[0]).all()
    assert (windows == 66).sum() == 500, "each conversation once"
    found = []
    for row in windows:
        ends = np.flatnonzero(row == 66)
        found += np.diff(np.concatenate([[0], ends])).tolist()
    assert sorted(found) == sorted(lengths.tolist())
    used = lengths.sum() / (windows.shape[0] * 40)
    assert used > 0.95, f"only {used:.2f} of the windows is text, with {OPEN_WINDOWS} open ones"


def test_a_long_conversation_ends_with_its_window() -> None:
    windows = pack([talk(100, answers=90), talk(100, answers=1), talk(5)], 40, END)
    assert len(windows) == 2, "the second has its answer behind the window"
    assert (windows[0] == 66).sum() == 30
    with pytest.raises(DataError, match="no conversation has an answer within 40 tokens"):
        pack([talk(100)], 40, END)


def test_parts_of_a_packed_text_are_disjoint() -> None:
    text = PackedText([talk(length) for length in range(2, 22)], END)
    assert len(text) == len(text.part(0, 2)) + len(text.part(1, 2))


def test_rows_that_are_no_conversations_are_counted(folder: Path) -> None:
    lines = (folder / "talks.jsonl").read_text() + '{"messages": []}\n'
    (folder / "talks.jsonl").write_text(lines)
    config = data()
    report = read_text(manifest(config), config.mixture[0], folder)
    assert report.documents == 40 and report.skipped_rows == 1 and "not a list of messages" in report.skipped[0]
    assert report.sample.startswith("<|im_start|>user after 0<|im_end|>")
    (folder / "talks.jsonl").write_text(lines + 10 * '{"messages": "text"}\n')
    with pytest.raises(DataError, match="11 of 51 rows"):
        open_corpus(config, folder)


def test_another_column_is_named(folder: Path) -> None:
    write_talks(folder / "talks.jsonl", 10, column="conversations")
    with pytest.raises(DataError, match="no column 'messages'; set data.column: conversations"):
        open_corpus(data(), folder)
    assert len(talks_in(read_all(open_corpus(data(column="conversations"), folder)))) >= 5


def test_shards_and_pipelines_have_no_conversations() -> None:
    with pytest.raises(ValueError, match="chat needs the source"):
        data("tokens")
    values = manifest(data()).model_dump(mode="json") | {"pipeline": {"stages": 2, "microbatch": 1}}
    values["model"] |= {"tied": False, "layers": 2}
    with pytest.raises(ValueError, match="data.chat needs pipeline.stages = 1"):
        Manifest.model_validate_json(json.dumps(values))


def test_a_template_that_ends_documents_within_a_conversation_excludes_their_end(folder: Path) -> None:
    model = ModelSection(**MODEL, document_end=256)
    require_document_end(model, data(), folder)
    template = "{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}"
    with pytest.raises(DataError, match="within a conversation"):
        require_document_end(model, data(chat={"template": template}), folder)

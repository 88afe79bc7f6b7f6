"""A mixture keeps its shares at every place, and each of its sources goes on at the very next window."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view

from node.data import BatchReader, open_corpus, validation_sets, window_blocks
from node.data.batches import CIRCLE, choose_sources
from node.data.check import check_text
from protocol.audits import MAX_POSITION
from protocol.errors import DataError, MissingFileError
from protocol.manifest.reading import load_manifest
from protocol.manifest.sections import DataSection
from tests.node.data.data_sets import numbers, write_rows

WEIGHTS = {"letters": 3.0, "digits": 1.0, "rows": 2.0}
CONTEXT = 16


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of three sources with different bytes; one of them is streamed."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(window_blocks, "BLOCK_TOKENS", 500)
    monkeypatch.setattr(window_blocks, "MIN_BLOCK_DOCUMENTS", 3)
    (tmp_path / "letters.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 100)
    (tmp_path / "digits.txt").write_text("".join(str(number) for number in range(1000)))
    write_rows(tmp_path / "set/a.jsonl", [{"text": chr(65 + index % 26) * 40} for index in range(100)])
    return tmp_path


def section(sources: list[dict[str, Any]]) -> DataSection:
    return DataSection.model_validate_json(json.dumps({"validation_share": 0.2, "sources": sources}))


def mixture(**weights: float) -> DataSection:
    sources = [
        {"name": "letters", "source": "text", "path": "letters.txt"},
        {"name": "digits", "source": "text", "path": "digits.txt"},
        {"name": "rows", "source": "hf", "path": "set"},
    ]
    return section([source | {"weight": (WEIGHTS | weights)[source["name"]]} for source in sources])


def name_sources(windows: torch.Tensor) -> list[str]:
    """Return the source of each window, by its bytes."""
    return ["digits" if row[0] < 58 else "rows" if row[0] < 91 else "letters" for row in windows.tolist()]


@pytest.mark.parametrize("weights", [(1.0,), (3.0, 1.0, 2.0), (0.0, 0.97, 0.0, 0.03), (1e-3, 1e3), (1.0, 0.0)])
@pytest.mark.parametrize("key", [0, 3, 2**127 + 2**63])
def test_shares_of_any_few_hundred_windows_are_near_the_weights(weights: tuple[float, ...], key: int) -> None:
    chosen = choose_sources(numbers(5000, 12_345), key, weights)
    random = np.random.default_rng(1).choice(len(weights), 5000, p=np.array(weights) / sum(weights))

    def worst(drawn: np.ndarray) -> float:
        counts = np.stack([sliding_window_view(drawn == index, 300).sum(1) for index in range(len(weights))], 1)
        return float(np.abs(counts - 300 * np.array(weights) / sum(weights)).max())

    assert worst(chosen) < 3
    assert 0 in weights or len(weights) == 1 or worst(random) > 3 or min(weights) < 0.01, "independent draws"
    assert set(chosen.tolist()) <= {index for index, weight in enumerate(weights) if weight}


def test_independent_draws_are_far_from_the_weights() -> None:
    """The negative control of the test above."""
    drawn = np.random.default_rng(1).random(5000) < 0.5
    assert np.abs(sliding_window_view(drawn, 300).sum(1) - 150).max() > 20


def test_peers_begin_at_different_places_of_the_order() -> None:
    orders = {choose_sources(numbers(50), key * 2**62, (1.0, 2.0)).tobytes() for key in range(4)}
    assert len(orders) == 4


def test_each_source_goes_on_at_its_next_window(folder: Path) -> None:
    corpus = open_corpus(mixture(), folder)
    reader = BatchReader(corpus, CONTEXT, 0, "a")
    for count in (1, 5, 30, 2, 40, 7):
        again = BatchReader(open_corpus(mixture(), folder), CONTEXT, 0, "a", position=reader.position)
        other = BatchReader(corpus, CONTEXT, 0, "a", position=reader.position + 1)
        batch = reader.next_batch(count)
        assert torch.equal(batch, again.next_batch(count)) and reader.position == again.position
        assert not torch.equal(batch, other.next_batch(count)), "the negative control"
    assert reader.position % CIRCLE == 85 and CIRCLE < reader.position < MAX_POSITION


def test_changed_weights_hold_from_the_next_window_and_open_a_source_late(folder: Path) -> None:
    reader = BatchReader(open_corpus(mixture(rows=0.0), folder), CONTEXT, 0, "a")
    assert sorted(set(name_sources(reader.next_batch(80)))) == ["digits", "letters"]
    reader.weights = (1.0, 0.0, 3.0)
    again = BatchReader(open_corpus(mixture(rows=0.0), folder), CONTEXT, 0, "a", reader.position)
    again.weights = (1.0, 0.0, 3.0)
    batch = reader.next_batch(80)
    assert torch.equal(batch, again.next_batch(80))
    found = name_sources(batch)
    assert "digits" not in found and abs(found.count("rows") - 60) < 4
    reader.seek(0)
    assert "digits" not in name_sources(reader.next_batch(80)), "a seek keeps the weights"


def test_single_source_reads_as_a_mixture_of_one(folder: Path) -> None:
    alone = DataSection(source="text", path="letters.txt")
    reader = BatchReader(open_corpus(alone, folder), CONTEXT, 0, "a")
    named = {"name": "letters", "source": "text", "path": "letters.txt"}
    of_one = BatchReader(open_corpus(section([named]), folder), CONTEXT, 0, "a")
    assert reader.next_batch(8).shape == of_one.next_batch(8).shape and reader.position == of_one.position == 8


def test_held_out_windows_are_kept_apart_by_source(folder: Path) -> None:
    sets = validation_sets(open_corpus(mixture(), folder), CONTEXT, 600)
    assert [(held.name, held.weight) for held in sets] == list(WEIGHTS.items())
    for held in sets:
        windows = torch.cat(held.batches)
        assert set(name_sources(windows)) == {held.name} and 5 <= len(windows) <= 12


@pytest.mark.parametrize(
    ("source", "kind", "text"),
    [
        ({"source": "text", "path": "nowhere/*.txt"}, MissingFileError, "source bad: no file matches"),
        ({"source": "tokens"}, DataError, "source bad: data.sources.bad.path is empty"),
        ({"source": "hf", "path": "letters.txt"}, DataError, "source bad: data.path 'letters.txt' is a file"),
    ],
)
def test_fault_of_a_source_names_it(folder: Path, source: dict[str, str], kind: type[Exception], text: str) -> None:
    good = {"name": "letters", "source": "text", "path": "letters.txt"}
    data = section([good, {"name": "bad"} | source])
    with pytest.raises(kind, match=text) as caught:
        open_corpus(data, folder)
    assert "\n" not in str(caught.value)


def test_fault_in_the_middle_of_training_names_the_source(folder: Path) -> None:
    corpus = open_corpus(mixture(), folder)
    reader = BatchReader(corpus, CONTEXT, 0, "a")
    reader.next_batch(8)
    (folder / "set/a.jsonl").unlink()
    with pytest.raises(DataError, match=r"source rows: .*a\.jsonl"):
        for _ in range(200):
            reader.next_batch(8)


def test_vocabulary_above_the_models_names_the_source(folder: Path) -> None:
    corpus = open_corpus(mixture(), folder)
    corpus.require_vocabulary(256)
    with pytest.raises(DataError, match=r"source letters: the text has 256 token ids, the model only 255"):
        corpus.require_vocabulary(255)


def test_sources_of_different_vocabularies_are_refused_before_and_while_training(folder: Path) -> None:
    shards = folder / "shards"
    shards.mkdir()
    header = {"dtype": "uint16", "vocabulary": 300, "tokenizer": "", "shards": [{"name": "00000.bin", "tokens": 4000}]}
    (shards / "header.json").write_text(json.dumps(header))
    (shards / "00000.bin").write_bytes(bytes(8000))
    letters = {"name": "letters", "source": "text", "path": "letters.txt"}
    data = section([letters, {"name": "shards", "source": "tokens", "path": "shards"}])
    run = load_manifest(Path(__file__).parents[3] / "configs" / "test.toml")
    model = run.model.model_copy(update={"vocabulary": 300})
    fault = "source letters has 256 token ids, source shards 300; tokenize all sources with the file"
    with pytest.raises(DataError, match=fault):
        open_corpus(data, folder)
    with pytest.raises(DataError, match=fault):
        check_text(run.model_copy(update={"data": data, "model": model}), folder)
    (shards / "header.json").write_text(json.dumps(header | {"vocabulary": 256}))
    reports = check_text(run.model_copy(update={"data": data, "model": model}), folder)
    assert [report.describe().partition(":")[0] for report in reports] == ["letters", "shards"], "the negative control"


def test_window_of_a_number_is_the_same_whenever_it_is_read(folder: Path) -> None:
    """Exact steps of pipelines read the text by number."""
    corpus = open_corpus(mixture(rows=0.0), folder)
    ordered, sought = (BatchReader(corpus, CONTEXT, 0, "exact") for _ in range(2))
    windows = ordered.next_batch(40)
    for number in (30, 2, 39, 0):
        sought.seek(number)
        assert torch.equal(sought.next_batch(1)[0], windows[number])

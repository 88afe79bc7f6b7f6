"""Streamed data sets: every usable row is read once per epoch, and a reader continues where it was."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from node.data import BatchReader, open_corpus, window_blocks
from node.data.corpus import PackedText, TokenArray
from protocol.errors import DataError, MurmurError
from tests.node.data.data_sets import hf_config, numbers, open_only, write_rows


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a data set of 40 examples in two files; example i is the byte i, i + 1 times."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = [{"text": chr(33 + index) * (index + 1), "other": index} for index in range(40)]
    write_rows(tmp_path / "set/a.jsonl", rows[:15])
    write_rows(tmp_path / "set/b.jsonl", rows[15:])
    return tmp_path


def held_out_tokens(corpus_validation: TokenArray | PackedText) -> set[int]:
    assert isinstance(corpus_validation, TokenArray)
    return set(corpus_validation.read(0, len(corpus_validation)).tolist())


@pytest.mark.parametrize("block_tokens", [50, 2**22])
def test_everything_is_read_or_held_out_in_an_epoch(
    examples: Path, monkeypatch: pytest.MonkeyPatch, block_tokens: int
) -> None:
    monkeypatch.setattr(window_blocks, "BLOCK_TOKENS", block_tokens)
    monkeypatch.setattr(window_blocks, "MIN_BLOCK_DOCUMENTS", 3)
    source = open_only(hf_config(), examples)
    held = held_out_tokens(source.validation)
    reader = source.training.windows(10, 5, 0)
    read: set[int] = set()
    while reader.place < 2**96:
        read |= set(reader.take(numbers(1)).flatten().tolist())
    assert 0 < len(held) < 20 and not held & read
    assert read | held == set(range(33, 73))


@pytest.mark.parametrize("block_tokens", [50, 100, 2**22])
def test_place_continues_at_the_very_window_over_epochs(
    examples: Path, monkeypatch: pytest.MonkeyPatch, block_tokens: int
) -> None:
    monkeypatch.setattr(window_blocks, "BLOCK_TOKENS", block_tokens)
    monkeypatch.setattr(window_blocks, "MIN_BLOCK_DOCUMENTS", 3)
    source = open_only(hf_config(), examples)
    reader = source.training.windows(10, 5, 0)
    for _ in range(60):
        again = source.training.windows(10, 5, reader.place)
        assert np.array_equal(reader.take(numbers(5)), again.take(numbers(5)))
        assert reader.place == again.place
    assert reader.place >= 2 * 2**96, "the third epoch"


def test_windows_do_not_depend_on_the_size_of_the_batch(examples: Path) -> None:
    source = open_only(hf_config(), examples)
    one, other = source.training.windows(10, 5, 0), source.training.windows(10, 5, 0)
    pieces = [other.take(numbers(count)) for count in (1, 9, 70, 120)]
    assert np.array_equal(one.take(numbers(200)), np.concatenate(pieces))


def test_peers_and_epochs_read_differently(examples: Path) -> None:
    corpus = open_corpus(hf_config(), examples)
    assert not torch.equal(
        BatchReader(corpus, 10, 0, "a").next_batch(20), BatchReader(corpus, 10, 0, "b").next_batch(20)
    )
    reader = corpus.sources[0].training.windows(10, 5, 0)
    first = [hashlib.sha256(reader.take(numbers(10)).tobytes()).digest() for _ in range(40)]
    assert len(set(first)) == 40


def test_columns_and_splits_are_checked(examples: Path) -> None:
    with pytest.raises(DataError, match="set data.column: other, text"):
        open_corpus(hf_config(column="body"), examples)
    with pytest.raises(DataError, match="no text in 'other'"):
        open_corpus(hf_config(column="other"), examples)
    with pytest.raises(MurmurError, match="fix data.path"):
        open_corpus(hf_config(split="dev"), examples)


def test_set_without_text_is_refused_instead_of_read_for_ever(examples: Path) -> None:
    for file in (examples / "set").iterdir():
        write_rows(file, [{"text": ""}] * 5)
    source = open_only(hf_config(), examples)
    with pytest.raises(DataError, match="holds no text to train on"):
        source.training.windows(10, 5, 0).take(numbers(1))


def test_set_shorter_than_a_window_is_refused(examples: Path) -> None:
    source = open_only(hf_config(), examples)
    with pytest.raises(DataError, match="the training text has ... tokens, a window 1001"):
        source.training.windows(1000, 5, 0)

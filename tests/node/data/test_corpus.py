"""Token arrays and the random order of windows."""

import numpy as np
import pytest

from node.data.corpus import Corpus, TokenArray, is_held_out
from protocol.errors import DataError
from tests.node.data.data_sets import numbers

ROW = TokenArray([np.arange(0, 7, dtype=np.uint8), np.empty(0, np.uint8), np.arange(7, 20, dtype=np.uint8)])


def test_reading_crosses_shards() -> None:
    assert len(ROW) == 20
    for start in range(20):
        for length in range(20 - start + 1):
            assert list(ROW.read(start, length)) == list(range(start, start + length))


def test_part_is_the_same_tokens() -> None:
    for start in range(20):
        for stop in range(start, 21):
            part = ROW.slice(start, stop)
            assert list(part.read(0, len(part))) == list(range(start, stop))


@pytest.mark.parametrize("first", [0, 1, 17, 2**40])
def test_window_depends_on_its_number_alone(first: int) -> None:
    windows = ROW.windows(4, key=9, place=0)
    whole = windows.take(numbers(12, first))
    for chosen in ([0], [3, 5, 11], [11, 2]):
        assert np.array_equal(windows.take(numbers(12, first)[chosen]), whole[chosen])
    assert windows.take(numbers(0)).shape == (0, 5)


def test_windows_reach_every_place_and_are_consecutive_tokens() -> None:
    windows = ROW.windows(4, key=1, place=0).take(numbers(2000))
    assert np.array_equal(windows - windows[:, :1], np.tile(np.arange(5), (2000, 1)))
    counts = np.bincount(windows[:, 0])
    assert len(counts) == 16 and counts.min() > 80 and counts.max() < 180


def test_keys_give_different_orders() -> None:
    assert not np.array_equal(ROW.windows(4, 1, 0).take(numbers(20)), ROW.windows(4, 2, 0).take(numbers(20)))


def test_text_shorter_than_a_window_is_refused() -> None:
    assert ROW.windows(19, 0, 0).take(numbers(1)).shape == (1, 20)
    with pytest.raises(DataError, match="20 tokens, a window 21"):
        ROW.windows(20, 0, 0)


def test_vocabulary_larger_than_the_models_is_refused() -> None:
    corpus = Corpus.of(ROW, ROW, vocabulary_size=300)
    corpus.require_vocabulary(300)
    with pytest.raises(DataError, match="set model.vocabulary to at least 300"):
        corpus.require_vocabulary(256)


def test_share_of_names_held_out() -> None:
    names = [f"file{index}".encode() for index in range(20_000)]
    assert 0.045 < sum(is_held_out(name, 0.05) for name in names) / len(names) < 0.055
    assert all(is_held_out(name, 0.1) for name in names if is_held_out(name, 0.05))

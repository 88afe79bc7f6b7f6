"""Blocks are bounded, filled little by little, and read again after a restart."""

from collections.abc import Iterator

import numpy as np
import pytest

from node.data import window_blocks
from node.data.window_blocks import Block, BlockStream, Document, RowPlace
from tests.node.data.data_sets import numbers

CONTEXT = 10


class CountedDocuments:
    """An epoch of equal documents; document n is the token n."""

    def __init__(self, count: int, length: int) -> None:
        self._count = count
        self._length = length
        self.tokens_read = 0

    def documents(self, key: int, start: RowPlace) -> Iterator[Document]:
        epoch, row = start.epoch, start.row
        while True:
            for number in range(row, self._count):
                self.tokens_read += self._length
                yield Document(np.full(self._length, number, dtype=np.uint16), RowPlace(epoch, 0, number + 1))
            epoch, row = epoch + 1, 0
            yield Document(np.empty(0, dtype=np.uint16), RowPlace(epoch, 0, 0))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_blocks, "BLOCK_TOKENS", 1000)
    monkeypatch.setattr(window_blocks, "MAX_BLOCK_TOKENS", 8000)
    monkeypatch.setattr(window_blocks, "MIN_BLOCK_DOCUMENTS", 8)


@pytest.mark.parametrize(
    ("length", "documents"),
    [
        (10, 100),  # tokens decide
        (500, 8),  # documents decide
        (3000, 3),  # memory decides
    ],
)
def test_block_ends_by_tokens_documents_or_memory(length: int, documents: int) -> None:
    block = Block(RowPlace(0, 0, 0))
    block.fill(CountedDocuments(1000, length).documents(0, block.start))
    assert block.tokens == documents * length and block.end == RowPlace(0, 0, documents)


def test_small_set_is_one_block_per_epoch_and_a_large_one_continues_in_the_next_epoch() -> None:
    block = Block(RowPlace(3, 0, 0))
    block.fill(CountedDocuments(5, 10).documents(0, block.start))
    assert block.tokens == 50 and block.end == RowPlace(4, 0, 0)
    block = Block(RowPlace(3, 0, 120))
    block.fill(CountedDocuments(150, 10).documents(0, block.start))
    assert block.tokens == 1000 and block.end == RowPlace(4, 0, 70)


def test_next_block_is_read_little_by_little() -> None:
    source = CountedDocuments(10_000, 10)
    stream = BlockStream(source, CONTEXT, key=1, place=0)
    assert source.tokens_read == 1000, "the first block"
    stream.take(numbers(5))
    assert source.tokens_read == 1000 + 2 * 5 * CONTEXT
    for _ in range(100):
        before = source.tokens_read
        stream.take(numbers(5))
        assert source.tokens_read - before <= 2 * 5 * CONTEXT, "no step reads a whole block"


def test_windows_cover_every_token_of_a_block_once_or_twice() -> None:
    stream = BlockStream(CountedDocuments(10_000, 7), CONTEXT, key=1, place=0)
    count = len(stream._windows)
    targets = np.bincount(stream.take(numbers(count))[:, 1:].flatten(), minlength=143)
    assert count == -(-1001 // CONTEXT) and stream.place == 143 * 2**24
    assert targets.min() >= 7 and targets.sum() == count * CONTEXT


def test_restart_reads_one_block_again_and_continues_with_the_very_next_window() -> None:
    source = CountedDocuments(10_000, 10)
    stream = BlockStream(source, CONTEXT, key=1, place=0)
    for _ in range(70):
        stream.take(numbers(5))
    again_source = CountedDocuments(10_000, 10)
    again = BlockStream(again_source, CONTEXT, key=1, place=stream.place)
    assert again_source.tokens_read == 1000 < source.tokens_read
    assert np.array_equal(stream.take(numbers(300)), again.take(numbers(300))) and stream.place == again.place


def test_orders_differ_by_key_and_block() -> None:
    stream = BlockStream(CountedDocuments(10_000, 10), CONTEXT, key=1, place=0)
    other = BlockStream(CountedDocuments(10_000, 10), CONTEXT, key=2, place=0)
    first, second = stream.take(numbers(100)), stream.take(numbers(100))
    assert not np.array_equal(first, other.take(numbers(100)))
    assert not np.array_equal(np.argsort(first[:, 0]), np.argsort(second[:, 0]))

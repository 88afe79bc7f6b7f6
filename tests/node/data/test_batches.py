"""A peer's own order, its restart, and the validation windows that all share."""

import numpy as np
import pytest
import torch

from node.data.batches import BatchReader, validation_batches
from node.data.corpus import Corpus, TokenArray
from protocol.errors import DataError


def corpus(validation: int = 100, vocabulary: int = 256) -> Corpus:
    row = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)
    return Corpus.of(TokenArray([row]), TokenArray([np.arange(validation, dtype=np.uint8)]), vocabulary)


def test_batches_are_windows_of_int64() -> None:
    batch = BatchReader(corpus(), 16, seed=0, peer_id="a").next_batch(4)
    assert batch.shape == (4, 17) and batch.dtype == torch.int64


def test_peers_and_seeds_read_differently() -> None:
    orders = [BatchReader(corpus(), 16, seed, peer).next_batch(8) for seed in (0, 1) for peer in ("a", "b")]
    for index, one in enumerate(orders):
        assert not any(torch.equal(one, other) for other in orders[index + 1 :])


def test_position_goes_on_where_it_was() -> None:
    first = BatchReader(corpus(), 16, 0, "a")
    first.next_batch(5)
    again = BatchReader(corpus(), 16, 0, "a", position=first.position)
    assert torch.equal(first.next_batch(3), again.next_batch(3))
    assert first.position == again.position == 8


def test_a_token_above_the_vocabulary_is_named() -> None:
    with pytest.raises(DataError, match="above 99; tokenize it again"):
        BatchReader(corpus(vocabulary=100), 16, 0, "a").next_batch(50)


@pytest.mark.parametrize(("max_tokens", "count"), [(10**6, 9), (33, 3), (1, 1)])
def test_validation_windows_are_fixed_and_spread(max_tokens: int, count: int) -> None:
    batches = validation_batches(corpus(), 11, max_tokens)
    windows = torch.cat(batches)
    assert windows.shape == (count, 12)
    assert torch.equal(windows, torch.cat(validation_batches(corpus(), 11, max_tokens)))
    starts = windows[:, 0].tolist()
    assert starts[0] == 0 and (count == 1 or starts[-1] == 100 - 12)
    assert all(later - earlier >= 11 for earlier, later in zip(starts, starts[1:], strict=False))


def test_validation_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(DataError, match=r"raise data\.validation_share"):
        validation_batches(corpus(validation=11), 11, 100)
    assert len(validation_batches(corpus(validation=12), 11, 100)) == 1

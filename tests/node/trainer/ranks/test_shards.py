"""Parts of parameters and batches: nothing is left out, and nothing counts twice."""

import pytest
import torch

from node.trainer.ranks.shards import own_pieces, own_shards
from optim.layout import Layout

LAYOUT = Layout(((31, 4), (5,), (2, 3, 4), (1,)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_parts_of_all_ranks_are_the_whole(ranks: int) -> None:
    covered: list[int] = []
    for rank in range(ranks):
        shards = own_shards(LAYOUT, ranks, rank)
        assert [shard.own[0] for shard in shards] == [0, *(shard.own[1] for shard in shards[:-1])]
        for shard, (start, stop) in zip(shards, LAYOUT.spans, strict=True):
            assert start <= shard.whole[0] <= shard.whole[1] <= stop
            assert shard.whole[1] - shard.whole[0] == shard.own[1] - shard.own[0]
            covered += range(*shard.whole)
    assert sorted(covered) == list(range(LAYOUT.numel))


def test_two_ranks_hold_a_half_each() -> None:
    held = [own_shards(LAYOUT, 2, rank)[-1].own[1] for rank in (0, 1)]
    assert held == [16 * 4 + 3 + 12 + 1, 15 * 4 + 2 + 12]


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_passes_of_all_ranks_are_the_batch(rows: int, ranks: int) -> None:
    windows = torch.arange(rows)[:, None].expand(rows, 3)
    dealt = [own_pieces(windows, ranks, rank, 2) for rank in range(ranks)]
    assert len({len(pieces) for pieces in dealt}) == 1, "every rank makes as many passes"
    read = [int(row) for pieces in dealt for piece in pieces if piece.weight for row in piece.windows[:, 0]]
    assert sorted(read) == list(range(rows))
    assert all(1 <= len(piece.windows) <= 2 for pieces in dealt for piece in pieces)
    assert sum(piece.weight for pieces in dealt for piece in pieces) == pytest.approx(1)

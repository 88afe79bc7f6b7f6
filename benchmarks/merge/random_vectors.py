"""Make the vectors from which the peers of a merge start, wherever they are needed: no process holds another one's."""

import math
from collections.abc import Iterator

import torch

BLOCK = 1 << 20
DEVIATION = 0.02


def random_vector(rank: int, numel: int) -> torch.Tensor:
    """Of that peer: normally distributed flat fp32."""
    return torch.cat([block for block in _blocks(rank, numel)])


def relative_error(found: torch.Tensor, peers: int) -> float:
    """The distance of `found` from the exact mean of the peers' vectors, over the norm of that mean."""
    numel, error, norm = found.numel(), 0.0, 0.0
    for place, blocks in enumerate(zip(*(_blocks(rank, numel) for rank in range(peers)), strict=True)):
        mean = torch.stack(blocks).double().mean(0)
        piece = found[place * BLOCK : place * BLOCK + mean.numel()].double()
        error, norm = error + float((piece - mean).square().sum()), norm + float(mean.square().sum())
    return math.sqrt(error / norm)


def _blocks(rank: int, numel: int) -> Iterator[torch.Tensor]:
    for place, start in enumerate(range(0, numel, BLOCK)):
        generator = torch.Generator().manual_seed(rank * 1_000_003 + place)
        yield DEVIATION * torch.randn(min(BLOCK, numel - start), generator=generator)

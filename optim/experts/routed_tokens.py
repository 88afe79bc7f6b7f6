"""Decide which experts a peer has trained enough to send them.

A peer counts for each expert the tokens that its router sent there since the peer last sent the expert. It sends an
expert of a layer (a block of the model) with

    tokens > 0  and  tokens >= SHARE * mean tokens of the layer's experts

Adam moves weights by nearly the same length whether a gradient comes from five tokens or from five thousand, so the
length of a movement does not tell how much it is worth. An expert below the threshold goes on counting, so that one
with a twentieth of the usual tokens is sent in about every fourth round instead of never.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from optim.layout import Layout

SHARE: Final = 0.25


def add_tokens(before: Sequence[int], more: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of each expert in two counts, of which the first may be empty."""
    return tuple(map(sum, zip(before, more, strict=True))) if before else tuple(more)


def find_trained(tokens: Sequence[int], layout: Layout) -> tuple[bool, ...]:
    """Return for each expert of a layout whether it is to be sent, from the tokens of each."""
    trained = list[bool]()
    for _, numbers in groupby(range(len(tokens)), key=layout.expert_blocks.__getitem__):
        counts = [tokens[number] for number in numbers]
        least = SHARE * sum(counts) / len(counts)
        trained += [count > 0 and count >= least for count in counts]
    return tuple(trained)

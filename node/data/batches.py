"""What a peer reads, in its own order, and what everybody is measured on.

A peer's order is drawn from (run seed, peer id): two peers read differently, one peer reads the same again from the
same position. The validation windows are the same for all.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

from node.data.corpus import Corpus
from protocol.errors import DataError

VALIDATION_SEQUENCES = 16


class BatchReader:
    """The endless row of one peer's batches; `position` goes into the snapshot."""

    def __init__(self, corpus: Corpus, context: int, seed: int, peer_id: str, position: int = 0) -> None:
        self._vocabulary_size = corpus.vocabulary_size
        self._windows = corpus.training.windows(context, order_key(seed, peer_id), position)

    @property
    def position(self) -> int:
        """Where the next batch starts, to be given to another Batches after a restart."""
        return self._windows.position

    def next_batch(self, sequences: int) -> Tensor:
        """Tokens (sequences, context + 1), int64."""
        windows = self._windows.take(sequences)
        if windows.max() >= self._vocabulary_size:
            # In a shard that someone damaged; on an accelerator it would kill the process without a word.
            raise DataError(
                f"token id {windows.max()} in the text, above {self._vocabulary_size - 1}; tokenize it again"
            )
        return torch.from_numpy(windows)


def order_key(seed: int, peer_id: str) -> int:
    """128 bits."""
    return int.from_bytes(hashlib.sha256(f"murmur order 1 {seed} {peer_id}".encode()).digest()[:16], "big")


def validation_batches(corpus: Corpus, context: int, max_tokens: int) -> list[Tensor]:
    """Windows spread evenly over the held-out text, at most `max_tokens` targets: int64 (<= 16, context + 1) each."""
    held = corpus.validation
    count = min((len(held) - 1) // context, max(1, max_tokens // context))
    if count < 1:
        raise DataError(
            f"the held-out text has {len(held)} tokens, a window {context + 1}; "
            "give more text, or raise data.validation_share"
        )
    starts = [(len(held) - 1 - context) * index // max(1, count - 1) for index in range(count)]
    windows = torch.from_numpy(np.stack([held.read(start, context + 1) for start in starts]))
    return list(torch.split(windows, VALIDATION_SEQUENCES))

"""Training batches in the order of one peer, and the validation batches of all peers.

The run's seed and the peer id determine the order: two peers read different windows, and one peer reads the same
windows again from the same position. The validation windows are the same for all peers.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

from node.data.corpus import Corpus
from protocol.errors import DataError

VALIDATION_SEQUENCES = 16


class BatchReader:
    """The endless sequence of one peer's batches. The trainer keeps `position` in its snapshot."""

    def __init__(self, corpus: Corpus, context: int, seed: int, peer_id: str, position: int = 0) -> None:
        self._vocabulary_size = corpus.vocabulary_size
        self._windows = corpus.training.windows(context, order_key(seed, peer_id), position)

    @property
    def position(self) -> int:
        """Return the start of the next batch, from which another reader can continue."""
        return self._windows.position

    def next_batch(self, sequences: int) -> Tensor:
        """Read the next batch of tokens: (sequences, context + 1), int64."""
        windows = self._windows.take(sequences)
        if windows.max() >= self._vocabulary_size:
            # The shard is damaged. On an accelerator such an id would kill the process without a message.
            raise DataError(
                f"token id {windows.max()} in the text, above {self._vocabulary_size - 1}; tokenize it again"
            )
        return torch.from_numpy(windows)


def order_key(seed: int, peer_id: str) -> int:
    """Return the 128-bit key of the order in which this peer reads."""
    return int.from_bytes(hashlib.sha256(f"murmur order 1 {seed} {peer_id}".encode()).digest()[:16], "big")


def validation_batches(corpus: Corpus, context: int, max_tokens: int) -> list[Tensor]:
    """Return windows spread evenly over the held-out text.

    They have at most `max_tokens` targets together; each batch is int64 (<= 16, context + 1).
    """
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

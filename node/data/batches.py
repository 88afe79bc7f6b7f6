"""Training batches in the order of one peer, and the validation batches of all peers.

The run's seed and the peer id determine the order: two peers read different windows, and one peer reads the same
windows again from the same position. The validation windows are the same for all peers.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

from node.data.corpus import Corpus, TokenIds, require_held_out_tokens
from node.data.skipped_rows import Fault, RowPass

VALIDATION_SEQUENCES = 16


class BatchReader:
    """The endless sequence of one peer's batches. The trainer keeps `position` in its snapshot."""

    def __init__(self, corpus: Corpus, context: int, seed: int, peer_id: str, position: int = 0) -> None:
        self._vocabulary_size = corpus.vocabulary_size
        self._windows = corpus.training.windows(context, order_key(seed, peer_id), position)
        self._pass = RowPass(corpus.skip_log)

    @property
    def position(self) -> int:
        """Return the start of the next batch, from which another reader can continue."""
        return self._windows.position

    def next_batch(self, sequences: int) -> Tensor:
        """Read the next batch of tokens: (sequences, context + 1), int64."""
        windows = self._take_usable(sequences)
        while len(windows) < sequences:
            windows = np.concatenate([windows, self._take_usable(sequences - len(windows))])
        return torch.from_numpy(windows)

    def _take_usable(self, count: int) -> TokenIds:
        """Read windows, and skip those with an id above the vocabulary."""
        return keep_usable(self._windows.take(count), self._vocabulary_size, self._pass, "training text")


def keep_usable(windows: TokenIds, vocabulary_size: int, row_pass: RowPass, part: str) -> TokenIds:
    """Return the windows without an id above the vocabulary.

    On an accelerator such an id would kill the process without a message.
    """
    highest = windows.max(axis=1)
    is_usable = highest < vocabulary_size
    row_pass.keep(int(is_usable.sum()))
    for token in highest[~is_usable]:
        text = f"token id {token} in the text, above {vocabulary_size - 1}; tokenize it again"
        row_pass.skip(part, "", Fault("id above vocabulary", text))
    usable: TokenIds = windows[is_usable]
    return usable


def order_key(seed: int, peer_id: str) -> int:
    """Return the 128-bit key of the order in which this peer reads."""
    return int.from_bytes(hashlib.sha256(f"murmur order 1 {seed} {peer_id}".encode()).digest()[:16], "big")


def validation_batches(corpus: Corpus, context: int, max_tokens: int) -> list[Tensor]:
    """Return windows spread evenly over the held-out text.

    They have at most `max_tokens` targets together; each batch is int64 (<= 16, context + 1).
    """
    held = corpus.validation
    require_held_out_tokens(len(held), context)
    count = min((len(held) - 1) // context, max(1, max_tokens // context))
    starts = [(len(held) - 1 - context) * index // max(1, count - 1) for index in range(count)]
    row_pass = RowPass(corpus.skip_log)
    windows = np.stack([held.read(start, context + 1) for start in starts])
    usable = keep_usable(windows, corpus.vocabulary_size, row_pass, "held-out text")
    row_pass.finish()
    return list(torch.split(torch.from_numpy(usable), VALIDATION_SEQUENCES))

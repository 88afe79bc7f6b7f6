"""Training text: sources of tokens, the reading order of each peer, and the held-out part."""

from node.data.batches import BatchReader, HeldOut, validation_batches, validation_sets
from node.data.corpus import Corpus
from node.data.source import open_corpus
from node.data.token_shards import tokenize_files

__all__ = [
    "BatchReader",
    "Corpus",
    "HeldOut",
    "open_corpus",
    "tokenize_files",
    "validation_batches",
    "validation_sets",
]

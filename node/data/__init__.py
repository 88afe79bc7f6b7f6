"""Training text: sources of tokens, the reading order of each peer, and the held-out part."""

from node.data.batches import BatchReader, validation_batches
from node.data.corpus import Corpus
from node.data.source import name_text_faults, open_source
from node.data.token_shards import tokenize_files

__all__ = ["BatchReader", "Corpus", "name_text_faults", "open_source", "tokenize_files", "validation_batches"]

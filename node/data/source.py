"""Open the source of text that the manifest's [data] table names."""

from pathlib import Path

from node.data.corpus import Corpus
from node.data.huggingface import open_huggingface
from node.data.text_files import open_stdlib, open_text
from node.data.token_shards import open_tokens
from node.data.tokenizer import open_tokenizer, tokenizer_digest
from protocol.errors import DataError
from protocol.manifest import DataSection


def open_source(config: DataSection, base: Path) -> Corpus:
    """Open the source of text of a run.

    Args:
        base: the manifest's folder, to which paths are relative.

    Raises:
        DataError, MissingFileError: with a message of one line.
    """
    if config.source == "tokens":
        if not config.path:
            raise DataError("data.path is empty; set it to a folder that `murmur tokenize` wrote")
        digest = tokenizer_digest(config.tokenizer, base)
        return open_tokens(base / config.path, config.validation_share, digest)
    tokenizer = open_tokenizer(config.tokenizer, base)
    if config.source == "python-stdlib":
        return open_stdlib(tokenizer, config.validation_share)
    if config.source == "text":
        return open_text(config.path, base, tokenizer, config.validation_share)
    return open_huggingface(config, base, tokenizer)

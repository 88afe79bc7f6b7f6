"""Open the source of text that the manifest's [data] table names."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from node.data.corpus import Corpus
from node.data.huggingface import open_huggingface
from node.data.text_files import build_corpus, find_files
from node.data.token_shards import open_tokens
from node.data.tokenizer import open_tokenizer, tokenizer_digest
from protocol.errors import DataError, MurmurError, describe_error
from protocol.manifest import DataSection


@contextmanager
def name_text_faults(config: DataSection) -> Iterator[None]:
    """Raise any unexpected error in the context as a DataError that names the source of text."""
    try:
        yield
    except (MurmurError, MemoryError):
        raise
    except Exception as error:  # libraries of formats and tokenizers raise errors of many kinds
        reason = describe_error(error).splitlines()[0]
        source = f"data.source = {config.source!r}" + (f", data.path = {config.path!r}" if config.path else "")
        raise DataError(
            f"cannot read the text ({source}): {type(error).__name__}: {reason}; check the files"
        ) from error


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
    if config.source == "hf":
        return open_huggingface(config, base, tokenizer)
    return build_corpus(*find_files(config, base), tokenizer, config.validation_share)
